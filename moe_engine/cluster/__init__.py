"""Processes and nodes: start, rendezvous, heartbeats, failure detection, supervision."""
