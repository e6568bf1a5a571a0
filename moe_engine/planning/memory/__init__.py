"""The memory ledger: its rows, the limit, and the KV cache that fits beside them; or the refusal."""
