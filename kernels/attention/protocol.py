"""Attention over a paged context. Two contracts for MLA, one for GQA.

Legend: T query tokens, R requests, H query heads, G KV heads, N qk_nope, P rotary width (64), C kv_lora_rank,
V v_head, Dh head width, S context tokens gathered.

A slot is one token's position in the KV pool. `slot_table[row, position]` names it; a page is `page_size` neighbouring
slots. Query tokens of a request are its last `query_lens[i]` positions; attention is causal unless
`PagedQueries.visible` defines a draft tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.ops.protocol import RotaryTable

MAX_TREE_TOKENS = 64
"""Max query tokens of a request with `PagedQueries.visible`: one bit each."""


class SharedRun(NamedTuple):
    """Requests [first, last) of a group with a shared prefix: `length` context tokens in the same slots."""

    first: int
    last: int
    length: int


@dataclass(frozen=True)
class PagedQueries:
    """Query tokens of some requests in a step, and the paged context they attend to.

    Host lists and device tensors hold the same values. `context_lens` include this step's tokens, whose KV is written
    before attention runs. `query_starts` [R+1] are prefix sums of `query_lens`.
    """

    query_lens: list[int]
    context_lens: list[int]
    rows: Tensor  # [R] int32
    query_starts: Tensor  # [R+1] int32
    context_lens_device: Tensor  # [R] int32
    slot_table: Tensor  # [max_rows, max_context] int32, shared by all steps
    page_size: int
    visible: Tensor | None = None
    """[T] int64, of draft trees: bit b of visible[t] is set if query token t sees query token b of its own request. Its
    own bit is always set, all context before the query tokens is visible. None: causal."""
    shared: Sequence[SharedRun] = ()
    """Shared prefixes: requests whose contexts begin in the same slots. Requests not listed share no useful prefix."""

    def __post_init__(self) -> None:
        if self.visible is None:
            return
        if max(self.query_lens, default=0) > MAX_TREE_TOKENS:
            raise ValueError(f"visible has a bit for {MAX_TREE_TOKENS} query tokens, a request has {self.query_lens}")
        if self.visible.dtype != torch.int64 or self.visible.shape != (self.num_tokens,):
            raise ValueError(
                f"visible is {self.visible.dtype} {list(self.visible.shape)}, not int64 [{self.num_tokens}]"
            )

    def refuse_tree(self, form: str) -> None:
        """Raises ValueError if these queries are a draft tree, which this `form` of attention does not support."""
        if self.visible is not None:
            raise ValueError(f"{form} attention is causal: a draft tree (visible) needs absorbed or paged attention")

    @property
    def num_requests(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_context_tokens(self) -> int:
        return sum(self.context_lens)


@dataclass(frozen=True)
class AttentionBatch:
    """The queries of a step in two groups, decode first in the token dimension.

    `decode` (tokens [0, decode.num_tokens)): few query tokens each; MLA runs them in the absorbed form.
    `prefill` (the tokens after): MLA runs them in the expanded form. Either may be None.
    """

    decode: PagedQueries | None
    prefill: PagedQueries | None


class MLABackend(Protocol):
    """Multi-head latent attention. The layer does projection, rotation and absorption; the backend does the softmax."""

    name: str

    def plan(self, batch: AttentionBatch) -> Any:
        """Host work, once per step. The result is passed to the calls below as `plan`."""

    def absorbed(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: Any, value_width: int | None = None
    ) -> Tensor:
        """Multi-query over the latent: q [T, H, C+P], cache [num_slots, C+P] -> [T, H, C].

        score = scale * q . cache[slot]; value = cache[slot][:C]; softmax in float32. `value_width` is C; None means all
        but the last 64 channels, as in every released model. The cache may hold FP8 rows (`kv_format`).
        """

    def gather_latent(
        self, cache: Tensor, queries: PagedQueries, plan: Any, out: Tensor | None = None, value_width: int | None = None
    ) -> Tensor:
        """The contexts of all requests, concatenated: [S, C+P]. Raises ValueError for a draft tree.

        Args:
            out: the destination and its dtype; required if the cache holds FP8 rows, with `value_width` (C).
        """

    def expanded(self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: Any) -> Tensor:
        """Varlen attention over expanded keys: q [T, H, N+P], kv [S, H, N+V], k_rope [S, P] -> [T, H, V].

        kv: keys, then values, per head. Raises ValueError for a draft tree.
        """


@runtime_checkable
class SharesContext(Protocol):
    """An MLA backend whose expanded form supports shared prefixes: the shared tokens are expanded once."""

    def expanded_shared(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: Any
    ) -> Tensor:
        """`MLABackend.expanded` over kv [U, H, N+V] and k_rope [U, P]: `queries.slot_table` names rows of these."""


@runtime_checkable
class ExpandsChunks(Protocol):
    """An MLA backend whose expanded form runs in context chunks, so that the keys and values of a long context never
    exist at once; chunk results are merged by their log-sum-exp."""

    def plan_chunk(self, queries: PagedQueries, first_keys: Sequence[int], key_lens: Sequence[int]) -> Any:
        """Plans tokens [first_keys[i], first_keys[i] + key_lens[i]) of request i's context: host work, once per step.
        The result is also `gather_latent`'s plan for these tokens, with `out` of their number.

        Every request has query tokens and keys. Either all chunks end at the end of their context and hold the query
        tokens, or all lie before the query tokens: vendor libraries support only these two masks. May raise ValueError
        for others.
        """

    def expanded_chunk(self, q: Tensor, kv: Tensor, k_rope: Tensor, scale: float, plan: Any) -> tuple[Tensor, Tensor]:
        """`MLABackend.expanded` over the chunk's tokens: (out [T, H, V], log-sum-exp [T, H] float32, natural), both
        contiguous."""

    def merge_chunks(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        """Merges `expanded_chunk`'s result for another chunk into `out` and `lse`, in place; all contiguous."""


@runtime_checkable
class RenewablePlan(Protocol):
    """A plan at fixed addresses, so that captured launches (a CUDA graph) can run with the plan of another step."""

    def renew(self) -> None:
        """Replans for the queries' current `context_lens`, in stream order; no host wait."""


@runtime_checkable
class Replayable(Protocol):
    """A backend whose decode launches depend only on memory at fixed addresses (CUDA-graph capturable)."""

    def plan_in_place(self, batch: AttentionBatch) -> RenewablePlan | None:
        """`plan`'s result for queries whose tensors and lists are overwritten at later steps.

        All requests have the same number of query tokens; no trees, no prefill group. Called after one eager run of the
        batch's shapes. Lazy per-layer work happens during capture, so a plan serves one captured graph. None if the
        results would differ from `plan`'s.
        """


@dataclass(frozen=True)
class MLALayer:
    """The weights of an MLA layer with absorbed products. Q: q_lora_rank, D: hidden."""

    down: PreparedLinear  # [Q+C+P, D]: q's latent (if any), then the KV latent and the rotary channels
    q_norm: Tensor | None  # [Q] float32
    q: PreparedLinear  # [H*(N+P), Q], or [H*(N+P), D] without q_norm
    kv_norm: Tensor  # [C] float32
    keys: PreparedLinear  # heads of [C, N]
    values: PreparedLinear  # heads of [V, C]
    o: PreparedLinear  # [D, H*V]
    rotary: RotaryTable
    eps: float  # of both norms
    scale: float


@runtime_checkable
class FusedMLA(Protocol):
    """A backend that also runs a whole MLA layer in one call, for weights in the formats it supports."""

    max_fused_tokens: int
    """Max query tokens per step for which the fused call is faster."""

    def fuse(self, layer: MLALayer) -> Any | None:
        """The handle for `run_layer`; None if these weights are not supported."""

    def run_layer(
        self, layer: Any, hidden: Tensor, positions: Tensor, slots: Tensor, cache: Tensor, queries: PagedQueries,
        plan: Any,
    ) -> Tensor:  # fmt: skip
        """hidden [T, D] -> [T, D] bit-identical to the separate calls; all tokens belong to `queries`.

        Writes the tokens' rows to cache[slots] before attention; positions and slots are [T] int64.
        """


class GQABackend(Protocol):
    """Grouped-query attention over paged K and V, for prefill and decode."""

    name: str

    def plan(self, batch: AttentionBatch) -> Any: ...

    def paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: PagedQueries, scale: float, plan: Any
    ) -> Tensor:
        """q [T, H, Dh], caches [num_slots, G, Dh] or FP8 rows (`kv_format`) -> [T, H, Dh]; softmax in float32."""
