"""Structured output: constraints of requests, grammars compiled from them, masks of the allowed tokens."""
