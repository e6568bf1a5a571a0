"""Draft trees for libraries that support causal masks only.

Context before a request's query tokens is visible to all of them: the library runs it without a mask and returns the
log-sum-exp. Attention among the few query tokens is added here, in one launch of Triton where that is installed and the
tensors are on a GPU, else in torch.

Legend: R requests, T query tokens, t most query tokens of a request, H query heads, G KV heads, W key width, V value
width.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import ModuleType

import torch
from torch import Tensor

from moe_engine.kernels.queries import PagedQueries


@dataclass(frozen=True)
class Tree:
    """The query tokens of a group, which has `PagedQueries.visible`."""

    queries: PagedQueries

    @classmethod
    def of(cls, queries: PagedQueries) -> Tree | None:
        """None if the queries are causal."""
        return None if queries.visible is None else cls(queries)

    def add(
        self, out: Tensor, lse: Tensor, q: Tensor, keys: Tensor, values: Tensor, scale: float, *, base_2: bool = False
    ) -> Tensor:
        """out [T, H, V] with the attention among the query tokens merged in; `out` may be overwritten.

        Args:
            out: attention over the context before the query tokens; ignored for requests without any.
            lse: [T, H] float32, its log-sum-exp; natural, or with `base_2` to base 2.
            q: [T, H, W]. keys, values: [slots, G, W] and [slots, G, V].
        """
        if (kernel := _kernel(q.device)) is not None:
            kernel(out, lse, q, keys, values, self.queries, scale, base_2=base_2)
            return out
        mask = self._mask
        return mask.merge(out, lse * math.log(2) if base_2 else lse, *mask.attend(q, keys, values, scale))

    @cached_property
    def _mask(self) -> TreeMask:
        return TreeMask.of(self.queries)


def _kernel(device: torch.device) -> Callable[..., None] | None:
    if device == torch.device("cpu"):
        return None
    module = _triton()
    return None if module is None else module.add_tree


@lru_cache
def _triton() -> ModuleType | None:
    try:
        return importlib.import_module("moe_engine.kernels.attention.triton.tree")
    except ImportError:
        return None


@dataclass(frozen=True)
class TreeMask:
    """In torch: positions of a group's query tokens and their visibility mask; built once per step."""

    request: Tensor  # [T] int64
    place: Tensor  # [T] int64: index of a token within its request
    token: Tensor  # [R, t] int64; unspecified but valid for shorter requests
    slots: Tensor  # [R, t] int64
    hidden: Tensor  # [R, t, t] bool: [r, i, j] token i must not see token j
    has_context: Tensor  # [T] bool: some context precedes the query tokens

    @classmethod
    def of(cls, queries: PagedQueries) -> TreeMask:
        assert queries.visible is not None
        device, most, total = queries.visible.device, max(queries.query_lens), queries.num_tokens
        starts = queries.query_starts.long()
        counts = starts.diff()
        context = queries.context_lens_device.long() - counts  # before the query tokens
        request = torch.repeat_interleave(torch.arange(len(counts), device=device), counts, output_size=total)
        place = torch.arange(total, device=device) - starts[request]
        column = torch.arange(most, device=device)
        known = column < counts[:, None]  # [R, t]
        token = (starts[:-1, None] + column).clamp_max(total - 1)
        position = torch.where(known, context[:, None] + column, 0)
        slots = queries.slot_table[queries.rows.long()[:, None], position].long()
        seen = (queries.visible[token][:, :, None] >> column & 1).bool() & known[:, None, :]
        return cls(request, place, token, slots, ~seen, (context > 0)[request])

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention among the query tokens, in float32.

        q [T, H, W], keys [slots, G, W], values [slots, G, V] -> out [T, H, V], log-sum-exp [T, H] (natural).
        """
        groups = keys.shape[1]
        k, v = keys[self.slots].float(), values[self.slots].float()  # [R, t, G, *]
        queries = q[self.token].float().unflatten(2, (groups, -1))  # [R, t, G, H/G, W]
        scores = torch.einsum("rigpw,rjgw->rgpij", queries, k).mul_(scale)
        scores = scores.masked_fill(self.hidden[:, None, None], float("-inf"))
        lse = scores.logsumexp(-1)  # [R, G, H/G, t]
        # padding rows see nothing; their results are unused
        out = torch.einsum("rgpij,rjgv->rigpv", (scores - lse[..., None]).exp(), v).flatten(2, 3)  # [R, t, H, V]
        return out[self.request, self.place], lse.flatten(1, 2).transpose(1, 2)[self.request, self.place]

    def merge(self, context: Tensor, context_lse: Tensor, tree: Tensor, tree_lse: Tensor) -> Tensor:
        """Merges two softmax results over different keys; out [T, H, V] in `context`'s dtype.

        context [T, H, V], context_lse [T, H] (natural): attention before the query tokens; ignored if there is none.
        """
        absent = ~self.has_context[:, None]
        share = torch.sigmoid(context_lse.float() - tree_lse).masked_fill(absent, 0.0)[..., None]
        before = context.float().masked_fill(absent[..., None], 0.0)
        return (before * share + tree * (1.0 - share)).to(context.dtype)
