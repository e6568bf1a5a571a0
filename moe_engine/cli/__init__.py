"""The commands of `moe-engine`, one module per command."""

USAGE_ERROR = 2
"""Exit code: the command line, the configuration or the checkpoint is invalid."""
