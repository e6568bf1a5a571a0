"""A TCP port that no program listens on."""

from moe_engine.processes.addresses import free_port as free_port
