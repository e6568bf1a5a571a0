"""Everything a GPU must show, in one command: ``python -m benchmarks.gpu_suite``."""
