"""Gated delta rule: linear attention with a state for each request."""
