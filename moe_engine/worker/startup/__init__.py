"""Startup before READY: the choice of kernels, the warm-up."""
