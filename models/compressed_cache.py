"""A layer's cache for attention to windows and compressed entries (DeepSeek V4).

Legend: N slots of tokens, E entries, Dh channels of a key, I of an index key.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class CompressedCache:
    """An entry has the slot of its tokens in the full KV pool, divided by their number."""

    rows: Tensor
    """[N + E, Dh]: keys of tokens by slot, then entries, so that one list of rows names both."""
    num_slots: int
    """N, the row of the first entry."""
    projected: tuple[Tensor, ...]
    """[N, n] each: what tokens contribute to entries, and to index keys."""
    index_keys: Tensor | None
    """[E, 1, I]; None: entries are not selected."""

    @property
    def entries(self) -> Tensor:
        """[E, Dh]."""
        return self.rows[self.num_slots :]
