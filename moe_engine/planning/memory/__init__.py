"""The memory ledger: its rows, the limit, and the KV cache that fits with them; or the refusal."""
