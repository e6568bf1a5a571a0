"""KV outside the pool: host-RAM tier, storage, transfers between servers, and trees with nodes there."""
