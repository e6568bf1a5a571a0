"""The tensors of the KV cache."""
