"""C++ sources of the CPU kernels; a package so that setuptools installs them."""
