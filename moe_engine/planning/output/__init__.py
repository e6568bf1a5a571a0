"""Readers of the resolved configuration: `--explain`, the flags of /server_info, limits of the scheduler, identity."""
