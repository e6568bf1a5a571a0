"""C++ kernels for the CPU: sources, build, bindings, availability (`why_not`)."""
