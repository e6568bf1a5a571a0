"""Tokens sorted by expert, gathered, and summed back with their weights."""
