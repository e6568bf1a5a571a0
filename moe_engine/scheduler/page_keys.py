"""Keys of pages in the storage: chained hashes, so that a key names a page with everything in front of it.

The chain begins with what requests must share to share KV beside the model: the version of the weights, the adapter,
the request's own key. The worker adds what changes the bytes of a rank (`worker.kv_cache.kv_schema`).
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
    """Keys of whole pages of radix-cache keys behind the page, or root, `before`."""
    packed, width = array("q", tokens).tobytes(), 8 * page_size
    keys = []
    for begin in range(0, len(packed), width):
        before = hashlib.blake2b(packed[begin : begin + width], key=before, digest_size=KEY_BYTES).digest()
        keys.append(before)
    return keys
