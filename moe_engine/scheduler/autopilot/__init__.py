"""Adapts the settings of a running scheduler to its load (`--autopilot`)."""

from moe_engine.scheduler.autopilot.autopilot import Autopilot

__all__ = ["Autopilot"]
