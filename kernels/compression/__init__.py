"""Compression of the KV cache: one entry for each window of tokens (DeepSeek V4)."""
