"""Structured output: correctness on drawn schemas and cost, ``python -m benchmarks.structured_output``."""
