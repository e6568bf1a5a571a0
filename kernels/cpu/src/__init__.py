"""C++ sources of the CPU kernels; a package so that they are installed with it."""
