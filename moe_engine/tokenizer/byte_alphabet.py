"""Byte alphabet of byte-level BPE vocabularies (GPT-2 and successors)."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Maps the printable character of each of the 256 bytes to the byte. Cached: do not modify the result."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
