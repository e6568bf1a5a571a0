"""Measurements turned into settings: planner, simulator, doctor."""
