"""``moe-engine router``: servers of one machine behind sglang-router."""
