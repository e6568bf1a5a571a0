"""The folder by which the second generation is found without an import."""
