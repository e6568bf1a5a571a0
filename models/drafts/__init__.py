"""Draft layers and heads for speculative decoding."""
