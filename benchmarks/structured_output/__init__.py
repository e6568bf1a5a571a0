"""Structured output: correctness on generated schemas and cost, ``python -m benchmarks.structured_output``."""
