"""Flags on their own: values out of range, contradictions, values inside JSON, names and parsers."""
