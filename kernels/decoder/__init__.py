"""Whole layers, whole decoders and draft chains in one call into the C++ kernels, for weights that the C++ rows
prepared."""
