"""Replicas on other machines: a desk beside the front end, and an agent on each of those machines."""
