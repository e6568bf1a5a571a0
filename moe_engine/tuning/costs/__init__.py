"""Seconds of an engine step: the contract (`step_cost`) and its sources."""
