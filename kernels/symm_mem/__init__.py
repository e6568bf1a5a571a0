"""Symmetric memory kernels: notify, dispatch and combine between ranks over plain pointers, and their memory layout."""
