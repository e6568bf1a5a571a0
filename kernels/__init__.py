"""Kernel families: attention, experts, linear, ops, sampling, permutation. Each has a protocol, a torch reference and a
table of rows.

Importing this package imports no backend; `kernels.registry.select` imports only the selected row.
"""
