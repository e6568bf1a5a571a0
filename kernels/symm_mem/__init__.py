"""Kernels that write into the memory of other ranks over plain pointers, and what they agree on."""
