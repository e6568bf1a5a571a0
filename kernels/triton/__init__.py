"""Shared by all Triton kernels: ahead-of-time compilation, the compilation guard, the list of modules."""
