"""How far a step is from the roofline, without a GPU: ``python -m benchmarks.step_costs --help``."""
