"""Hardware as data: one TOML file a GPU (`gpus/`) and a network (`links/`)."""
