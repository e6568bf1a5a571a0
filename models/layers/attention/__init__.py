"""Attention layers: MLA, GQA and sparse forms, their chunks, indexers and rotations."""
