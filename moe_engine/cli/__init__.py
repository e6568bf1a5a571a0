"""The commands of `moe-engine`, one file a command."""
