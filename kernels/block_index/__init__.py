"""Selection of blocks of the context for sparse grouped-query attention."""
