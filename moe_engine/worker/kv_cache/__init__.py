"""The KV cache pool: tensors of the KV cache."""
