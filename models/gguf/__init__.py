"""GGUF files of llama.cpp: their types, names and metadata as those of a checkpoint in hub layout."""
