"""Attention within runs of tokens, without a cache: of vision towers."""
