"""Recorded steps (CUDA graphs) and compiled regions."""
