"""Tensors of a model by its config. Imports no torch."""
