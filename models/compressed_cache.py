"""A layer's cache for attention to windows and compressed entries (DeepSeek V4).

Legend: N slots of tokens, E entries, Dh channels of a key, I of an index key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from moe_engine.models.config import ModelConfig


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

    @classmethod
    def of_layer(cls, config: ModelConfig, layer: int, num_slots: int, new: Callable[..., Tensor]) -> CompressedCache:
        """A cache whose tokens and entries have the same slots. new: (*shape) -> memory."""
        rate, widths = config.entry_parts(layer)
        (width,), *projected = config.kv_parts(layer, config.checkpoint_dtype)
        num_entries = num_slots // rate if rate else 0
        keys = new(num_entries, 1, widths[1]) if len(widths) > 1 else None
        return cls(new(num_slots + num_entries, width), num_slots, tuple(new(num_slots, *p) for p in projected), keys)
