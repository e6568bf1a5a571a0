"""Checks of a node for a fleet of GPUs: the table *Check a node* of docs/gpu_quickstart.md, run by
``moe-engine doctor`` and ``moe-engine cluster-check``."""
