"""Keys of the radix cache: usually the tokens themselves.

With MTP, the draft KV of a token also depends on its successor. The radix cache is then keyed by pairs of neighbors
(bigrams), so that requests share a slot only if both tokens are equal.
"""

from __future__ import annotations

from itertools import pairwise

_SHIFT = 32


def bigrams(tokens: list[int]) -> list[int]:
    """n tokens -> n - 1 keys, one for each pair of neighbors."""
    return [(first << _SHIFT) | second for first, second in pairwise(tokens)]
