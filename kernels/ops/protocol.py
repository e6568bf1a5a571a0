"""Small fused operations between the matrix products: norms, rotary embedding, activation, cache writes, routing.

Legend: T tokens, D hidden, H heads, G KV heads, Dh width of a key, V width of a value, N qk_nope, R rotary width,
C kv_lora_rank, E experts, K experts per token.
All tensors of one call are on one device. Activations are bf16, fp16 or fp32; norm weights are stored in the
activation dtype or fp32; positions are int64, slots int32 or int64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from moe_engine.kernels.gate_form import SILU, GatedActivation
from moe_engine.kernels.ops.gated_streams import GatedStreams
from moe_engine.kernels.ops.head_factors import ScaleHeads
from moe_engine.kernels.ops.layer_norm import AddLayerNorm
from moe_engine.kernels.ops.ngram_products import NgramProducts
from moe_engine.kernels.ops.ngram_rows import Ngrams
from moe_engine.kernels.ops.residual_blocks import MixBlocks
from moe_engine.kernels.ops.short_conv import GatedConv
from moe_engine.kernels.ops.streams import MixNormStreams, MixStreams
from moe_engine.kernels.ops.zero_experts import AddInput
from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, QuantizedActivation


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines by position, with any attention factor multiplied in.

    `cos_sin` is [max_position, R] float32: the R/2 cosines, then the R/2 sines. Interleaved pairs are
    (x[2j], x[2j+1]) rotated in place (DeepSeek); half-split pairs are (x[j], x[j + R/2]) (Llama).
    """

    cos_sin: Tensor
    interleaved: bool
    query_scale: Tensor | None = None
    """[max_position] float32: factor of queries by position, which layers apply; None: 1 everywhere."""

    @property
    def width(self) -> int:
        return self.cos_sin.shape[1]


@dataclass(frozen=True)
class RouterSpec:
    """Router: expert selection and weights from logits, as in DeepSeek V2 and V3 and common variants.

    score: ``sigmoid``, ``softmax`` over all E, or ``sqrtsoftplus``, the square root of log(1 + exp(logit)) (DeepSeek
    V4), in float32. ``sparsemixer`` (Phi-3.5-MoE) chooses the largest logits one after the other; the weight of each is
    its softmax over those not chosen before whose logit l is within 2 `jitter` max(|l|, largest) of it; without biases,
    groups, shared and given experts. With `has_bias` the selection (not the weight) uses score + bias; with
    `bias_on_logits` the bias is added to the logits instead (gpt-oss). `group_score`: None (no groups), ``top2`` (V3:
    sum of the two best of a group) or ``max`` (V2). Experts outside the best `topk_groups` groups are excluded.
    `renormalize` divides weights by their sum plus `sum_eps`; `scale` multiplies them at the end. `num_shared` shared
    experts follow: every token selects them with weight `shared_weight`, as choices from K on and experts from E on.
    With `shared_gate` the gate has a row E, and that weight is multiplied by the sigmoid of its logit. With `held` the
    choices are slots of a rank that holds the experts [first, first + held) and the shared ones after them; -1: an
    expert of another rank.
    """

    num_experts: int
    top_k: int
    score: str
    has_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str | None = None
    renormalize: bool = False
    scale: float = 1.0
    num_shared: int = 0
    bias_on_logits: bool = False
    shared_weight: float = 1.0
    shared_gate: bool = False
    first: int = 0
    held: int | None = None
    jitter: float = 0.0
    sum_eps: float = 1e-20

    @property
    def num_held(self) -> int:
        """Routed experts in slots before the shared ones."""
        return self.num_experts if self.held is None else self.held

    @property
    def of_all_ranks(self) -> RouterSpec:
        """With experts as choices."""
        return replace(self, first=0, held=None)

    @property
    def num_logits(self) -> int:
        """Rows of the gate."""
        return self.num_experts + self.shared_gate

    @property
    def num_choices(self) -> int:
        """Columns of the router's results: K and the shared experts."""
        return self.top_k + self.num_shared


@dataclass(frozen=True)
class QuantizedNorms:
    """Norms that also quantize their result, in the same pass over memory; the format is the consumers'."""

    rms_norm: Callable[[ActivationFormat, Tensor, Tensor, float], QuantizedActivation]
    """(format, x, weight, eps) -> `Ops.rms_norm` of x [T, D] (rows may be strided)."""

    add_rms_norm: Callable[[ActivationFormat, Tensor, Tensor, Tensor, float], QuantizedActivation]
    """(format, x, residual, weight, eps): residual += x, in place; `Ops.rms_norm` of it. x and residual [T, D],
    residual contiguous."""

    add_pair_rms_norm: Callable[[ActivationFormat, Tensor, Tensor, Tensor, Tensor, float], QuantizedActivation]
    """(format, x, other, residual, weight, eps): `add_rms_norm` of x + other, in x's dtype; other contiguous."""

    add_rows_rms_norm: Callable[[ActivationFormat, ExpertRows, Tensor, Tensor, float], QuantizedActivation]
    """(format, rows, residual, weight, eps): `add_rms_norm` of the experts' sum."""


class AddNormRoute(Protocol):
    """`Ops.add_rms_norm` and the router of its result."""

    def __call__(
        self, format: ActivationFormat, x: Tensor, residual: Tensor, weight: Tensor, eps: float, gate: Tensor,
        bias: Tensor | None, spec: RouterSpec, real: Tensor | None, ids_int64: bool,
        ahead: Tensor | None = None,
    ) -> tuple[Activation, Tensor, Tensor]:  # fmt: skip
        """residual [T, D] += x in place, contiguous; its norm in `format`, which includes unquantized values; weights
        and ids of `Ops.route` for it, ids int64 or int32. ahead: as in `Absorb`."""


class Absorb(Protocol):
    """MLA's absorbed query in one launch with `Ops.write_latent`."""

    def __call__(
        self, q: Tensor, keys: Tensor, kv_a: Tensor, weight: Tensor, eps: float, positions: Tensor, table: RotaryTable,
        slots: Tensor, cache: Tensor, query_dtype: torch.dtype | None = None, scale: float = 1.0,
        ahead: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[T, H, C+R]: keys [H, C, N] times the first N channels of q [T, H, N+R], then its rotated last R.

        query_dtype: float8_e4m3fn for unscaled, saturated queries; None: that of q. scale: as in `Ops.write_latent`.
        ahead: a contiguous weight that is read soon; the launch may bring it to a cache.
        """


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm weights [Dh] float32 of each head of q and of k."""

    q: Tensor
    k: Tensor
    eps: float


class GroupedRows(Protocol):
    """The rows of grouped-query attention in one launch. Caches of FP8 records are not supported."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor | None, norms: HeadNorms | None, positions: Tensor, table: RotaryTable,
        slots: Tensor, k_cache: Tensor, v_cache: Tensor | None, bias: Tensor | None = None, trailing: bool = False,
    ) -> Tensor:  # fmt: skip
        """q [T, H, Dh], k [T, G, Dh] and v [T, G, V], views of any row strides: `bias` [H Dh + G Dh + G V] added, in
        their dtype, `Ops.rms_norm` of q and k by `norms`, `Ops.rotate_leading` or, with `trailing`, `Ops.rotate`, then
        `Ops.write_kv`. Returns the new q, contiguous; the arguments do not change. v and v_cache None: keys only. H may
        be 0: no queries."""


class GateHeads(Protocol):
    def __call__(self, x: Tensor, gate: Tensor, softplus: bool = False) -> Tensor:
        """x [T, H, Dh] * sigmoid(gate [T, H, Dh] or [T, H, 1]), or * softplus(gate), in place if x is contiguous."""


@dataclass(frozen=True)
class Gates:
    """Gates by sigmoid, in one launch each; product and sigmoid are rounded to the dtype of their argument."""

    heads: GateHeads

    rows: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(rows, x, weight): rows [T, D] *= sigmoid(x @ weight.T), in place; x [T, D], weight [1, D]."""


@dataclass(frozen=True)
class CacheRows:
    """Where rows go: cache[slots], [N, W]."""

    slots: Tensor
    cache: Tensor


class RoundRows(Protocol):
    """Rows of a rounded cache, and queries over them, in one launch."""

    def __call__(
        self, x: Tensor, norm: tuple[Tensor, float] | None, positions: Tensor, table: RotaryTable, rounding: str,
        to: CacheRows | None = None, q: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [T, H, W] (any strides of tokens and heads): `Ops.rms_norm` by weight and eps, `Ops.rotate`, and the
        rounding of that name, each rounded to x's dtype; x may change. Returns the rows, or with `to` the cache, to
        which rows [T, W] of one head are written. q [T, H', W]: `Ops.rotate` of it by the same launch."""


@dataclass(frozen=True)
class OpsCapabilities:
    """The optional parts of a row of ops; None: not supported."""

    quantized_norms: QuantizedNorms | None = None

    add_pair_rms_norm: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor] | None = None
    """(x, other, residual, weight, eps): `Ops.add_rms_norm` of x + other, in x's dtype. Set if the sum costs no launch
    of its own."""

    add_rows_rms_norm: Callable[[ExpertRows, Tensor, Tensor, float], Tensor] | None = None
    """(rows, residual, weight, eps): `Ops.add_rms_norm` of the experts' sum, in one launch."""

    route_int64: (
        Callable[[Tensor, Tensor, Tensor | None, RouterSpec, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
        | None
    ) = None
    """`Ops.route` with int64 ids, written in this type by its last launch."""

    route_ahead: Callable[..., tuple[Tensor, Tensor]] | None = None
    """`Ops.route`, with one argument more: `ahead`, as of `Absorb`."""

    add_norm_route: AddNormRoute | None = None
    """Set if small steps take one launch."""

    routes_shared: bool = False
    """`Ops.route` supports `RouterSpec.num_shared`, `shared_gate` and `held`."""

    absorb: Absorb | None = None

    grouped_rows: GroupedRows | None = None

    gates: Gates | None = None

    lookup: Callable[[Tensor, Tensor, int], Tensor] | None = None
    """(ids, weight, first): [T, D], weight[ids - first] of ids [T] and weight [W, D], contiguous; 0 for other ids."""

    mix_streams: MixStreams | None = None
    """None: in torch, `kernels.ops.streams`."""

    gated_streams: GatedStreams | None = None
    """None: in torch, `kernels.ops.gated_streams`."""

    ngrams: Ngrams | None = None
    """None: in torch, `kernels.ops.ngram_rows`."""

    ngram_products: NgramProducts | None = None
    """None: in torch, `kernels.ops.ngram_products`."""

    mix_norm_streams: MixNormStreams | None = None
    """Set if the norm costs no launch of its own."""

    round_rows: RoundRows | None = None
    """None: by other operations, `kernels.ops.block_rounding`."""

    mix_blocks: MixBlocks | None = None
    """None: in torch, `kernels.ops.residual_blocks`."""

    add_input: AddInput | None = None
    """None: in torch, `kernels.ops.zero_experts`."""

    scale_heads: ScaleHeads | None = None
    """None: in torch, `kernels.ops.head_factors`."""

    layer_norm: AddLayerNorm | None = None
    """None: in torch, `kernels.ops.layer_norm`."""

    norms_ahead: bool = False
    """Norms, quantized or not, take `ahead`, as `Absorb`."""

    gated_conv: GatedConv | None = None
    """None: in torch, `kernels.ops.short_conv`."""


class Ops(Protocol):
    """Small operations of a layer. Each returns new tensors unless documented as in place."""

    name: str

    @property
    def capabilities(self) -> OpsCapabilities: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., D] * rsqrt(mean(x^2) + eps), reduced in float32 and cast to x's dtype before the weight."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; returns rms_norm(residual). x and residual [T, D]."""

    def silu_and_mul(self, gate_up: Tensor, form: GatedActivation = SILU) -> Tensor:
        """gate_up [T, 2I] (gate first) -> [T, I], silu(gate) * up or another `form`; `squared` without a gate, of up
        [T, I]."""

    def rotate(self, x: Tensor, positions: Tensor, table: RotaryTable, inverse: bool = False) -> None:
        """Rotates the last `table.width` channels of x [T, H, *] (strided views allowed), in place.

        Args:
            inverse: rotates by the negative angles (DeepSeek V4's attention results).
        """

    def rotate_leading(self, x: Tensor, positions: Tensor, table: RotaryTable) -> None:
        """Rotates the first `table.width` channels of x [T, H, *], in place (dense models, partial rotary)."""

    def write_latent(
        self,
        kv_a: Tensor,
        weight: Tensor,
        eps: float,
        positions: Tensor,
        table: RotaryTable,
        slots: Tensor,
        cache: Tensor,
        scale: float = 1.0,
    ) -> None:
        """Writes MLA's cache rows: kv_a [T, C+R] -> cache[slots] = [rms_norm(latent) | rotated k_rope].

        cache is [num_slots, C+R], in the activation dtype, or FP8 rows (`attention.kv_format`), whose values
        are rounded to the activation dtype first. kv_a may be a strided view and is not changed.

        Args:
            scale: divides rows of `FP8_TENSOR`; other formats have no use for it.
        """

    def write_kv(self, k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """k [T, G, Dh], v [T, G, V] -> k_cache[slots], v_cache[slots]; caches [num_slots, G, Dh] and [num_slots, G, V]
        or FP8 rows."""

    def prepare_gate(self, gate: Tensor) -> Tensor:
        """gate [E, D] float32 or bfloat16, as stored in the checkpoint -> the same values as `route` reads them. Once,
        while loading."""

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec, real: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """x [T, D], gate [E, D] from `prepare_gate`, bias [E] float32 -> weights [T, K] float32, expert ids [T, K]
        int32. With `experts` int32 [T, K] these are the ids, and only their weights come from x.

        Logits and all later values are float32. Tokens whose `real` int32 [T] is 0 (padding of a captured step) choose
        no expert: their ids are -1.
        """
