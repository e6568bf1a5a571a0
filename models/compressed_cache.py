"""A layer's cache for attention to windows and compressed entries (DeepSeek V4).

Legend: N slots of tokens, E entries, Dh channels of a key, I of an index key, K rows of contributions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_engine.kernels.compression.protocol import Kept
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.compressed import KeptRows, entry_group


@dataclass(frozen=True, slots=True)
class CompressedCache:
    """An entry has the slot of its tokens in the full KV pool, divided by their number."""

    rows: Tensor
    """[N + E, Dh]: keys of tokens by slot, then entries, so that one list of rows names both."""
    num_slots: int
    """N, the row of the first entry; if other layers read the entries too, their rows of tokens are between."""
    kept: tuple[Kept, ...]
    """What earlier tokens contribute to entries, and to index keys, [K, n] each."""
    index_keys: Tensor | None
    """[E, 1, I]; None: entries are not selected."""
    ids: Tensor | None = None
    """[N, n]: bits of an int32 id of each token; None: none is kept."""

    @property
    def entries(self) -> Tensor:
        """[E, Dh]."""
        return self.rows[self.num_slots :]

    @classmethod
    def of_layers(
        cls, config: ModelConfig, layers: Sequence[int], num_slots: int, max_rows: int, new: Callable[..., Tensor]
    ) -> list[CompressedCache]:
        """Caches whose tokens and entries have the same slots, for requests in `max_rows` rows. new: (*shape) ->
        memory."""
        found = dict[int, CompressedCache]()
        for layer in layers:
            if layer in found:
                continue
            rate, widths = config.entry_parts(layer)
            (width,), *others = config.kv_parts(layer, config.checkpoint_dtype)
            num_entries = num_slots // rate if rate else 0
            keys = new(num_entries, 1, widths[1]) if len(widths) > 1 else None
            kept: tuple[Kept, ...] = ()
            if (rows := config.kept_rows(layer)) is not None:
                count = num_kept(rows, num_slots, max_rows)
                kept = tuple(Kept(new(count, width), rows.each, rows.block) for width in rows.widths)
            group = entry_group(config.attention_of(layer), layer)
            joined = new(len(group) * num_slots + num_entries, width)
            ids = new(num_slots, *others[0]) if others else None
            found |= {own: cls.part(joined, i, len(group), num_slots, kept, keys, ids) for i, own in enumerate(group)}
        return [found[layer] for layer in layers]

    @classmethod
    def part(
        cls, joined: Tensor, i: int, count: int, num_slots: int, kept: tuple[Kept, ...], keys: Tensor | None,
        ids: Tensor | None,
    ) -> CompressedCache:  # fmt: skip
        """The cache of layer i of `count` that read the same entries. joined [count N + E, Dh]: keys of tokens of all
        layers, then the entries."""
        return cls(joined[i * num_slots :], (count - i) * num_slots, kept, keys, ids)


def num_kept(rows: KeptRows, num_slots: int, max_rows: int) -> int:
    """Rows K of a pool with `num_slots` slots of tokens. Requests are after the rows of padding."""
    return rows.each * (num_slots // rows.block if rows.block else 1 + max_rows)
