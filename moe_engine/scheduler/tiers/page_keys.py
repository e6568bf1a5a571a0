"""Keys of pages in the storage: chained hashes, so that a key identifies a page together with its whole prefix.

The chain begins with the properties, other than the model, that requests must have in common to share KV: version of
the weights, adapter, the request's own key. The worker adds the properties that change a rank's bytes
(`worker.kv_cache.make_copies.schema_of`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Sequence

KEY_BYTES = 20


def root_key(weights: str, adapter: str, namespace: Hashable, page_size: int, bigrams: bool) -> bytes:
    """The beginning of a chain."""
    text = repr((weights, adapter, namespace, page_size, bigrams))
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def page_keys(before: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Keys of the whole pages of radix-cache keys that follow the page, or root, `before`."""
    packed, width = array("q", tokens).tobytes(), 8 * page_size
    keys = []
    for begin in range(0, len(packed), width):
        before = hashlib.blake2b(packed[begin : begin + width], key=before, digest_size=KEY_BYTES).digest()
        keys.append(before)
    return keys
