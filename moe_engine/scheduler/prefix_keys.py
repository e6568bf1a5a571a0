"""What the prefix tree files a run of tokens under.

Usually the tokens themselves. A drafter that reads a token together with its successor (MTP) leaves KV at a token's
slot that depends on both, so there the tree is keyed by pairs of neighbours: a slot is shared by requests that agree in
both.
"""

from __future__ import annotations

from itertools import pairwise

_SHIFT = 32


def bigrams(tokens: list[int]) -> list[int]:
    """n tokens -> n - 1 keys, one for each pair of neighbours."""
    return [(first << _SHIFT) | second for first, second in pairwise(tokens)]
