"""Processes and nodes: startup, rendezvous, heartbeats, failure detection, supervision."""
