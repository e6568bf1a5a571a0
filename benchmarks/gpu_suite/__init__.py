"""All GPU checks and measurements in one command: ``python -m benchmarks.gpu_suite``."""
