"""Attention over a paged context: the contracts of MLA and GQA backends, and their optional parts.

Legend: T query tokens, R requests, H query heads, G KV heads, N qk_nope, P rotary width (64), C kv_lora_rank,
V v_head, Dh width of a key, S context tokens gathered. `queries.py` defines slots, pages and masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.attention.selected import SparseAttention
from moe_engine.kernels.queries import AttentionBatch, PagedQueries

if TYPE_CHECKING:
    from moe_engine.kernels.decoder.calls import DecoderCalls


@dataclass(frozen=True)
class ContextChunks:
    """The expanded form in context chunks, so that the keys and values of a long context never exist at once; chunk
    results are merged by their log-sum-exp."""

    plan: Callable[[PagedQueries, Sequence[int], Sequence[int]], Any]
    """(queries, first_keys, key_lens) -> the plan of tokens [first_keys[i], first_keys[i] + key_lens[i]) of request i's
    context: host work, once per step. The result is also `gather_latent`'s plan for these tokens, with `out` of their
    number.

    Every request has query tokens and keys. Either all chunks end at the end of their context and hold the query
    tokens, or all lie before the query tokens: vendor libraries support only these two masks. May raise ValueError for
    others."""

    expanded: Callable[[Tensor, Tensor, Tensor, float, Any], tuple[Tensor, Tensor]]
    """(q, kv, k_rope, scale, plan) -> `MLABackend.expanded` over the chunk's tokens: (out [T, H, V], log-sum-exp [T, H]
    float32, natural), both contiguous."""

    merge: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    """(out, lse, other, other_lse): merges the result for another chunk into `out` and `lse`, in place; all
    contiguous."""


@dataclass(frozen=True)
class AbsorbedValues:
    """The absorbed form and the product by W_UV of few tokens."""

    run: Callable[[Tensor, Tensor, PagedQueries, float, Any, Tensor], Tensor]
    """(q, cache, queries, scale, plan, W_UV [H, V, C]): `MLABackend.absorbed`, multiplied by W_UV: [T, H, V]. q and
    W_UV have one dtype."""

    max_tokens: int
    """Largest T for which `run` saves a launch."""


@dataclass(frozen=True)
class AttentionCapabilities:
    """The optional parts of an attention backend; None: not supported. All but the first, `windows`, `chunked` and
    `capped` are of MLA."""

    plan_in_place: InPlacePlanner | None = None
    """Decode launches that depend only on memory at fixed addresses (CUDA-graph capturable): `plan`'s result for
    queries whose tensors and lists are overwritten at later steps.

    All requests have the same number of query tokens; no prefill group; trees only if the plan is `on_device`. Called
    after one eager run of the batch's shapes. Lazy per-layer work happens during capture, so a plan serves one captured
    graph. None if the results would differ from `plan`'s."""

    chunks: ContextChunks | None = None

    expanded_shared: Callable[[Tensor, Tensor, Tensor, PagedQueries, float, Any], Tensor] | None = None
    """Shared prefixes, expanded once: `MLABackend.expanded` over kv [U, H, N+V] and k_rope [U, P], with
    `queries.slot_table` naming rows of these."""

    sparse: SparseAttention | None = None
    """Attention over the tokens that an indexer selected. The row in `kernels.tables` has `sparse` set."""

    windows: bool = False
    """`paged` supports `PagedQueries.window`. The row in `kernels.tables` has the same field."""

    sinks: Callable[[Tensor, Tensor, Tensor, PagedQueries, float, Any, Tensor], Tensor] | None = None
    """`GQABackend.paged` with a last argument, float32 [H]: a logit of each head that takes part in the softmax of
    every query and has no value (gpt-oss). The row in `kernels.tables` has a field of this name."""

    capped: Callable[[Tensor, Tensor, Tensor, PagedQueries, float, Any, Tensor | None, float], Tensor] | None = None
    """`GQABackend.paged` with sinks or None, and a cap above 0: scores are cap * tanh(score / cap), sinks stay as they
    are (Gemma 2). The row in `kernels.tables` has a field of this name."""

    fp8_queries: bool = False
    """`absorbed` over a cache of unscaled e4m3 numbers (`kv_format`'s `FP8_TENSOR`) multiplies e4m3 queries: it takes
    unscaled e4m3 queries too, and returns bfloat16."""

    absorbed_values: AbsorbedValues | None = None

    decoder: DecoderCalls | None = None
    """Whole layers, decoders and draft chains in one call."""

    chunked: bool = False
    """`paged` supports a `ChunkWindow`. The row in `kernels.tables` has the same field."""


class MLABackend(Protocol):
    """Multi-head latent attention. The layer does projection, rotation and absorption; the backend does the softmax."""

    name: str

    @property
    def capabilities(self) -> AttentionCapabilities: ...

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


class GQABackend(Protocol):
    """Grouped-query attention over paged K and V, for prefill and decode."""

    name: str

    @property
    def capabilities(self) -> AttentionCapabilities: ...

    def plan(self, batch: AttentionBatch) -> Any: ...

    def paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: PagedQueries, scale: float, plan: Any
    ) -> Tensor:
        """q [T, H, Dh], caches [num_slots, G, Dh] and [num_slots, G, V] or FP8 rows (`kv_format`) -> [T, H, V]; softmax
        in float32. Raises ValueError for widths without a kernel (`kernels.vendors.limits`)."""
