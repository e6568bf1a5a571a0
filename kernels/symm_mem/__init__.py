"""Symmetric memory kernels: dispatch and combine between ranks over plain pointers, and their memory layout."""
