"""Storage below the host-RAM tier of the KV cache: pages of tokens by key. No torch."""
