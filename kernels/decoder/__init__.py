"""Whole-decoder calls into the C++ kernels: all layers, or a whole draft chain, in one call."""
