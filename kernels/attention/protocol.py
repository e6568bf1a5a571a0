"""Attention over a paged context. Two contracts for MLA, one for GQA.

Legend: T query tokens, R requests, H query heads, G KV heads, N qk_nope, P rotary width (64), C kv_lora_rank,
V v_head, Dh head width, S context tokens gathered.

A slot is one token's place in the KV pool. `slot_table[row, position]` names it; a page is `page_size` neighbouring
slots. Query tokens of a request are its last `query_lens[i]` positions; each sees itself and everything before it,
unless `PagedQueries.visible` draws a tree.
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
"""Query tokens of a request where `PagedQueries.visible` is given: one bit each."""


class SharedRun(NamedTuple):
    """Requests [first, last) of a group, the first `length` tokens of whose contexts lie in the same slots."""

    first: int
    last: int
    length: int


@dataclass(frozen=True)
class PagedQueries:
    """Some requests of a step: which query tokens, against which paged context.

    Host lists and device tensors say the same. `context_lens` include this step's tokens, whose KV is written before
    attention runs. `query_starts` [R+1] are prefix sums of `query_lens`.
    """

    query_lens: list[int]
    context_lens: list[int]
    rows: Tensor  # [R] int32
    query_starts: Tensor  # [R+1] int32
    context_lens_device: Tensor  # [R] int32
    slot_table: Tensor  # [max_rows, max_context] int32, shared by all steps
    page_size: int
    visible: Tensor | None = None
    """[T] int64, of draft trees: bit b of visible[t] says that query token t sees query token b of its own request. Its
    own bit is always set, all context before the query tokens is visible. None: each sees those before it."""
    shared: Sequence[SharedRun] = ()
    """Of requests whose contexts begin in the same slots; those not named share nothing that is worth knowing."""

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
        """Raises ValueError if these queries are a draft tree, which the `form` of attention does not know."""
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
    """The queries of a step, in two groups that lie one behind the other in the token dimension.

    `decode` (tokens [0, decode.num_tokens)): few query tokens each; MLA runs them in the absorbed form.
    `prefill` (the tokens after): MLA runs them in the expanded form. Either may be None.
    """

    decode: PagedQueries | None
    prefill: PagedQueries | None


class MLABackend(Protocol):
    """Multi-head latent attention; the layer owns the algebra (project, rotate, absorb), the backend the softmax."""

    name: str

    def plan(self, batch: AttentionBatch) -> Any:
        """Host work, once a step; the value goes to the calls below as `plan`."""

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
        """The context of every request, one behind the other: [S, C+P]. Raises ValueError for a draft tree.

        Args:
            out: where it goes, and in which dtype; needed where the cache holds FP8 rows, with `value_width` (C).
        """

    def expanded(self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: Any) -> Tensor:
        """Varlen attention over expanded keys: q [T, H, N+P], kv [S, H, N+V], k_rope [S, P] -> [T, H, V].

        kv holds a head's keys first, then its values. Raises ValueError for a draft tree.
        """


@runtime_checkable
class SharesContext(Protocol):
    """An MLA backend whose expanded form takes contexts that begin with the same tokens, expanded once."""

    def expanded_shared(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: Any
    ) -> Tensor:
        """`MLABackend.expanded` over kv [U, H, N+V] and k_rope [U, P]: `queries.slot_table` names rows of these."""


@runtime_checkable
class ExpandsParts(Protocol):
    """An MLA backend whose expanded form takes a context in parts, so that a long one's keys and values are never held
    at once; results of parts are put together by their log-sum-exp."""

    def plan_part(self, queries: PagedQueries, first_keys: Sequence[int], key_lens: Sequence[int]) -> Any:
        """Of tokens [first_keys[i], first_keys[i] + key_lens[i]) of request i's context: host work, once a step. The
        value is also `gather_latent`'s plan for these tokens, with `out` for as many.

        Every request has query tokens and keys. Either all parts end where the contexts end and hold the query tokens,
        or all lie before the query tokens: libraries know these two masks. May raise ValueError for others.
        """

    def expanded_part(self, q: Tensor, kv: Tensor, k_rope: Tensor, scale: float, plan: Any) -> tuple[Tensor, Tensor]:
        """`MLABackend.expanded` over the part's tokens: (out [T, H, V], log-sum-exp [T, H] float32, natural), both
        contiguous."""

    def merge_parts(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        """What `expanded_part` gave for one part takes in that of another, in place; all contiguous."""


@runtime_checkable
class RenewablePlan(Protocol):
    """A plan whose memory stays where it is, so that recorded launches (a CUDA graph) read the plan of another step."""

    def renew(self) -> None:
        """Plans again for the queries' present `context_lens`, in stream order; the host waits for nothing."""


@runtime_checkable
class Replayable(Protocol):
    """A backend of either kind whose launches of a decode group depend on nothing but memory that stays in place."""

    def plan_in_place(self, batch: AttentionBatch) -> RenewablePlan | None:
        """What `plan` returns, for queries whose tensors and lists will be overwritten with those of other steps.

        All requests have the same number of query tokens, there are no trees and no prefill group. Asked for after the
        batch's shapes were run once; what a call of a layer makes lazily is made while launches are recorded, so a plan
        is used for one recording. None where results would not be those of `plan`.
        """


@dataclass(frozen=True)
class MLALayer:
    """The weights of an MLA layer with absorbed products. Q: q_lora_rank, D: hidden."""

    down: PreparedLinear  # [Q+C+P, D]: q's latent (where it has one), then the KV latent and the rotary channels
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
    """A backend that also runs a whole MLA layer in one call, where weights are as it wants them."""

    max_fused_tokens: int
    """Query tokens of a step up to which that gains anything."""

    def fuse(self, layer: MLALayer) -> Any | None:
        """What `run_layer` takes; None where these weights cannot be run so."""

    def run_layer(
        self, layer: Any, hidden: Tensor, positions: Tensor, slots: Tensor, cache: Tensor, queries: PagedQueries,
        plan: Any,
    ) -> Tensor:  # fmt: skip
        """hidden [T, D] -> [T, D] with the bits of the separate calls; all tokens belong to `queries`.

        Writes the tokens' rows to cache[slots] before attention; positions and slots are [T] int64.
        """


class GQABackend(Protocol):
    """Grouped-query attention over paged K and V, for prefill and decode alike."""

    name: str

    def plan(self, batch: AttentionBatch) -> Any: ...

    def paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: PagedQueries, scale: float, plan: Any
    ) -> Tensor:
        """q [T, H, Dh], caches [num_slots, G, Dh] or FP8 rows (`kv_format`) -> [T, H, Dh]; softmax in float32."""
