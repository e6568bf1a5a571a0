"""The commands of `moe-engine`, one module per command."""
