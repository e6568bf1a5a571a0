"""C++ kernels for the CPU: sources, how they are compiled and called, and when they cannot be (`why_not`)."""
