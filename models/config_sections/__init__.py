"""Parts of a model's config: frozen values and the reader of a config.json's fields. Imports no torch."""
