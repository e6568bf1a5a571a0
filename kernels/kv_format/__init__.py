"""Rows of the KV cache: plain values, FP8 records of latents and heads. Imported by rows of every family."""
