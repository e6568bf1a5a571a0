"""Layers with a state of fixed size for each request instead of KV."""
