"""config.json of each family -> `models.config.ModelConfig`. Imports no torch."""
