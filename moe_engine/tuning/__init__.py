"""Tuning: what engines, logs and guides say about the flags of a launch. Imports no torch."""
