"""Norms and streams around the residual, and rows that are added to it."""
