"""Speculation as part of a step: draft, verify, accept, draft extend."""
