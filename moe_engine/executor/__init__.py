"""Executor of one core's ranks: process groups, plan broadcast, the leader's worker."""
