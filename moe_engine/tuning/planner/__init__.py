"""Planner: the steady state of a form of parallelism under a workload, and the search over forms."""
