"""What the engine is measured with; each module is a command: ``python -m benchmarks.<name> --help``."""
