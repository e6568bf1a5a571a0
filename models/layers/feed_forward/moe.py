"""The mixture-of-experts part: route, run the chosen experts, add the shared ones.

Legend: T tokens, D hidden, E experts, K experts per token, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.decoder.counting import CountPlace
from moe_engine.kernels.decoder.layers import FusedMoE, MoELayer
from moe_engine.kernels.experts.protocol import ExpertsKernel
from moe_engine.kernels.ops.protocol import Ops, RouterSpec
from moe_engine.kernels.ops.reference import in_slots, with_padding
from moe_engine.kernels.ops.zero_experts import AddInput, add_input
from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.quantization.protocol import (
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    BlockFP8,
    as_format,
    common_format,
    unquantized,
)
from moe_engine.models.batch import RoutedTokens
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.expert_format import width_group
from moe_engine.models.layers.attention.step_adapters import StepAdapters
from moe_engine.models.layers.feed_forward.expert_table import read_expert_table
from moe_engine.models.layers.feed_forward.gated_mlp import GatedMLP, ScaledMLP
from moe_engine.models.layers.feed_forward.latent_experts import LatentExperts
from moe_engine.models.layers.feed_forward.mlp import MLP
from moe_engine.models.layers.feed_forward.scaled_inputs import ScaledInputs
from moe_engine.models.layers.feed_forward.stored_experts import StoredExperts, held_experts
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.overlap_stages import Stages, finish
from moe_engine.models.tensors.model import expert_names
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.dispatch.protocol import Phase
from moe_engine.parallel.dp_gather_scatter import TokenLayout
from moe_engine.parallel.experts import DispatchedExperts, LocalExperts, RoutedExperts, make_routed_experts
from moe_engine.parallel.overlap import InlineStream
from moe_engine.parallel.share import WHOLE, Share

_WITH_FACTORS = (GatedMLP, ScaledMLP)
Choice = tuple[Tensor, Tensor]
"""Weights float32 and slots [T, K] of a step's tokens."""


def router_spec(moe: MoEConfig, num_shared: int = 0, ep: Share = WHOLE) -> RouterSpec:
    """The router settings for the kernels; num_shared: shared experts fused into the routed ones. With them the ranks
    of `ep` hold different routed experts, and each adds its part of the shared ones' result. No rank holds zero
    experts: their choices are -1."""
    several = bool(num_shared) and ep.size > 1
    count = ep.width(moe.num_experts) if several else moe.num_experts  # placed experts need no equal parts
    return RouterSpec(
        shared_gate=bool(num_shared) and moe.shared_gate,
        shared_weight=moe.shared_scale / (ep.size if several else 1),
        first=ep.rank * count if several else 0,
        held=count if several or moe.num_zero else None,
        num_experts=moe.num_choices,
        top_k=moe.top_k,
        score=moe.score,
        has_bias=moe.has_bias,
        num_groups=moe.num_groups,
        topk_groups=moe.topk_groups,
        group_score=moe.group_score,
        renormalize=moe.renormalize,
        scale=moe.scale,
        num_shared=num_shared,
        bias_on_logits=moe.bias_on_logits,
        jitter=moe.jitter,
        sum_eps=moe.sum_eps,
    )


class ExpertIdsRecorder(Protocol):
    """Receives the expert ids chosen by a layer's router."""

    counting: bool

    def ids_buffer(self, num_tokens: int) -> Tensor:
        """int32 [T, K] buffer that a fused layer call may fill and pass to `on_select`."""

    def on_select(self, layer_index: int, topk_ids: Tensor) -> None:
        """topk_ids int [T, K] slots; only while `counting`."""


class LayerRecorder(ExpertIdsRecorder, Protocol):
    """Also receives counts."""

    @property
    def counts_dispatched(self) -> bool:
        """Whether it reads `on_dispatch`."""

    def count_place(self, layer_index: int) -> CountPlace | None:
        """Where the layer may count its choices by itself; None: their ids are needed."""

    def on_dispatch(self, layer_index: int, counts: Tensor) -> None:
        """counts [P/G]: tokens received for this rank's slots; only while `counting`."""


class MoE:
    """x [T, D] -> sum_k w_k expert_k(x) + shared(x), [T, D]. Gate and bias keep their stored values.

    On many ranks with all-to-all, x is this rank's tokens; each rank holds full experts and the full shared expert.
    Otherwise x is the tokens of all ranks; each rank holds some of the experts, sharded by width, and a part of the
    shared expert, and the result is a partial sum.

    Without all-to-all, shared experts are fused into the routed ones if that costs no copy: every rank stores them in
    the slots after its routed ones, and the router chooses them for every token. A gate of theirs is a row of the
    router's. Groups of ranks with different experts all compute them, for a part of their weight.
    """

    def __init__(
        self, config: ModelConfig, layer_index: int, backends: Backends, reader: WeightSource, parallel: ParallelContext
    ) -> None:
        moe, names = config.moe_of(layer_index), expert_names(config)
        assert moe is not None
        hidden, wide, latent = config.hidden_size, torch.float32, moe.latent > 0
        self.layer_index = layer_index
        prefix = f"model.layers.{layer_index}.{names.block}"
        router = f"{prefix}.{names.router}"
        gate = reader.tensor(router, (moe.num_choices, hidden), dtype=reader.gate_dtype(router))
        bias = f"{prefix}.{names.router_bias}"
        shape = (1, moe.num_choices) if names.bias_rows else (moe.num_choices,)
        hashes = moe.hashes(layer_index)
        self._bias = reader.tensor(bias, shape, dtype=wide).flatten() if moe.has_bias and not hashes else None
        self._image_bias: Tensor | None = None
        """The router's bias for image tokens."""
        if config.routes_images(layer_index):
            self._image_bias = reader.tensor(f"{prefix}.{names.router_image_bias}", (moe.num_experts,), dtype=wide)
        table = f"{prefix}.{names.router_table}"
        self._table = read_expert_table(reader, table, config.vocab_size, moe) if hashes else None
        """Experts by token id [V, K] int32, in a layer that chooses by it."""
        travels = parallel.dispatcher is not None
        self.tokens = TokenLayout.SHARE if travels else TokenLayout.ALL
        self._tables = parallel.experts
        shared = f"{prefix}.{names.shared}".rstrip(".")
        part, routed = Share.of(parallel.moe_tp), f"{prefix}.experts"
        group = width_group(config, BlockFP8 in backends.experts.capabilities.quantized)
        self.stored = StoredExperts(
            backends.experts, routed, moe, config.routed_size, names, part, shared, group, layer_index
        )
        self._activates_alike = moe.activation(layer_index) == moe.activation(layer_index, shared=True)
        num_shared = self._num_fused(moe, backends, parallel, reader)
        self._spec = router_spec(moe, num_shared, Share.of(parallel.ep))
        if self._spec.shared_gate:
            name = f"{prefix}.{names.shared_gate}"
            gate = torch.cat((gate, reader.tensor(name, (1, hidden), dtype=reader.gate_dtype(name))))
        self._gate = backends.ops.prepare_gate(gate)  # [E, D], with a row E for the shared experts' gate
        held = held_experts(moe, layer_index, parallel)
        self.weights = self.stored.load(reader, [*held, *range(moe.num_experts, moe.num_experts + num_shared)])
        """Weights of the experts in this rank's slots."""
        self._read_first = backends.experts.capabilities.read_first if num_shared else None
        slots = backends.experts, self.weights
        self._routed: RoutedExperts = LocalExperts(*slots) if num_shared else make_routed_experts(*slots, parallel)
        if latent:
            self._routed = LatentExperts(config, prefix, self._routed, backends, reader, parallel)
        elif moe.scales_input:
            self._routed = ScaledInputs(self._routed)
        self._shared: MLP | None = None
        if moe.shared_width and not num_shared:
            share = WHOLE if travels else Share.of(parallel.world)
            of_mlp = (backends, reader, shared, hidden, moe.shared_width)
            if moe.shared_gate:
                self._shared = GatedMLP(*of_mlp, gate=f"{prefix}.{names.shared_gate}", share=share)
            elif moe.shared_scale != 1.0:
                self._shared = ScaledMLP(*of_mlp, factor=moe.shared_scale, share=share)
            else:
                self._shared = MLP(*of_mlp, share=share, activation=moe.activation(layer_index, shared=True))
        self._add_input: AddInput | None = None
        """Adds the input times the weights of zero experts; None: the rank adds none of them. One rank of those with
        partial sums does."""
        if moe.num_zero and (travels or parallel.world_rank == 0):
            self._add_input = backends.ops.capabilities.add_input or add_input
        self._route = backends.ops.route
        self._int64 = self._int64_phases(backends.ops)
        self._route_int64 = backends.ops.capabilities.route_int64
        self._route_ahead = backends.ops.capabilities.route_ahead
        self._norm_route = backends.ops.capabilities.add_norm_route
        self.fused = None if latent or moe.scales_input or moe.normed else self._fuse(backends.experts, parallel)
        """The whole layer in one call; None if not supported."""
        self._overlap = parallel.overlap if isinstance(self._routed, DispatchedExperts) else None
        self.adapters: StepAdapters | None = None
        """LoRA adapters of the step, for the shared expert; None without LoRA."""
        self._recorder: ExpertIdsRecorder | None = None
        self._counted_at: CountPlace | None = None

    def _num_fused(self, moe: MoEConfig, backends: Backends, parallel: ParallelContext, reader: WeightSource) -> int:
        """Number of shared experts in slots of their own after the routed ones: all of them, or 0."""
        able = backends.ops.capabilities.routes_shared and backends.experts.capabilities.takes_shared
        in_order = parallel.dispatcher is None and parallel.experts is None
        wanted = moe.num_shared_slots(parallel.ep_size) if self._activates_alike else 0
        if not (able and in_order and wanted and backends.fuse_shared_experts):
            return 0
        return self.stored.num_fusible(reader)

    def _int64_phases(self, ops: Ops) -> set[Phase]:
        """Phases in which the router writes ids in the dispatcher's dtype."""
        routed, phases = self._routed, set[Phase]()
        if ops.capabilities.route_int64 is None or self._tables is not None:
            return phases
        phases.update(("prefill", "decode"))
        return {phase for phase in phases if isinstance(routed, DispatchedExperts) and routed.reads_int64(phase)}

    def _fuse(self, kernel: ExpertsKernel, parallel: ParallelContext) -> FusedMoE | None:
        fuse = kernel.capabilities.fuse_layer
        if fuse is None or self._tables is not None or self._table is not None or parallel.dispatcher is not None:
            return None
        if self.weights.num_experts < self._spec.num_experts or not self._activates_alike:
            return None
        plain = self._shared is not None and not isinstance(self._shared, _WITH_FACTORS)
        shared = self._shared.weights if self._shared is not None and plain else None
        return fuse(MoELayer(self._gate, self._bias, self._spec, self.weights, shared))

    def record(self, recorder: LayerRecorder | None) -> None:
        """Sets the recorder of every pass's choices, or of received tokens, while it counts; None: no recording.
        Counted inside the fused call if the layer is one call and counts suffice."""
        self.count(recorder)
        if self.fused is not None:
            apart = self._image_bias is not None  # steps with image tokens are no fused call
            place = None if recorder is None or apart else recorder.count_place(self.layer_index)
            self.fused.count_choices(place)
            self._counted_at = place
            if place is not None:
                self.count(None)
        routed = self._routed.routed if isinstance(self._routed, LatentExperts | ScaledInputs) else self._routed
        if isinstance(routed, DispatchedExperts):
            routed.on_arrival = None if recorder is None else self._arrivals_to(recorder)

    def _arrivals_to(self, recorder: LayerRecorder) -> Callable[[Tensor], None] | None:
        def arrived(counts: Tensor) -> None:
            if recorder.counting:
                recorder.on_dispatch(self.layer_index, counts)

        return arrived if recorder.counts_dispatched else None

    @property
    def gate_dtype(self) -> torch.dtype:
        """Dtype of the router's weight in memory: float32 or bfloat16."""
        return self._gate.dtype

    @property
    def records_experts(self) -> bool:
        """True if the choices must be recorded on the host. Otherwise unused, or counted inside the fused call."""
        return self._recorder is not None

    def expert_ids_buffer(self, num_tokens: int) -> Tensor | None:
        """int32 [T, K] buffer for a whole-layer call, then an argument of `record_expert_ids`; None while not
        recording."""
        recorder = self._recorder
        return recorder.ids_buffer(num_tokens) if recorder is not None and recorder.counting else None

    def record_expert_ids(self, ids: Tensor) -> None:
        """Records the experts [T, K] of a pass while a counter is active."""
        assert self._recorder is not None
        self._recorder.on_select(self.layer_index, ids)

    def count(self, counter: ExpertIdsRecorder | None) -> None:
        """Sets the counter of expert choices; None: no counter."""
        self._recorder = counter

    @property
    def in_one_call(self) -> FusedMoE | None:
        """`fused` if it is the whole part: a shared expert with a factor is added after it."""
        return None if isinstance(self._shared, _WITH_FACTORS) else self.fused

    @property
    def shared(self) -> MLP | None:
        """The shared expert."""
        return self._shared

    @property
    def read_first(self) -> Tensor | None:
        """Memory that the first product reads whatever the router chooses; None without shared experts in slots."""
        return self._read_first(self.weights, self._spec.num_held) if self._read_first is not None else None

    @property
    def input_format(self) -> ActivationFormat:
        """Common activation format of the router, the shared expert and the routed experts."""
        shared = () if self._shared is None else (self._shared.input_format,)
        return common_format(UNQUANTIZED, self._routed.input_format, *shared)

    def after_norm(
        self, norm: RMSNorm, x: Tensor, residual: Tensor, phase: Phase = "prefill", tokens: RoutedTokens | None = None
    ) -> tuple[Activation, Choice | None]:
        """residual [T, D] += x in place; the norm of it, as input of `forward`, and the router's choice if one call
        computes both: `chosen` of the methods below."""
        fused = self._norm_route if len(residual) and norm.fuses_router and self._table is None else None
        if fused is None or self._images(tokens) is not None:
            return norm.add(x, residual), None
        real = None if tokens is None else tokens.real
        early = real if self._tables is None else None
        int64 = phase in self._int64 and not self._counting
        gate = (self._gate, self._bias, self._asked, early, int64, self.read_first)
        hidden, weights, ids = norm.add_with(fused, x, residual, *gate)
        return hidden, self._in_slots(weights, ids, real)

    def forward(
        self, x: Activation, phase: Phase = "prefill", tokens: RoutedTokens | None = None, chosen: Choice | None = None
    ) -> Tensor:
        adapted = self.adapters is not None and self.adapters.active
        if self.fused is not None and not adapted and self._images(tokens) is None:
            return self._forward_fused(x)  # type: ignore[arg-type]  # `input_format` has no rows
        if self._overlap is not None and self._overlap.shared_expert:
            return finish(self.stages(x, phase, tokens, chosen))
        weights, ids = chosen or self._choose(x, tokens, phase)
        beside = self._beside(x, weights, ids)
        return self._routed.run(as_format(x, self._routed.input_format), weights, ids, beside, phase)

    def _beside(self, x: Activation, weights: Tensor, ids: Tensor) -> Tensor | None:
        """What the routed experts' result is added to: the shared expert's, and that of zero experts."""
        shared = None if self._shared is None else self._shared.forward(x)
        return shared if self._add_input is None else self._add_input(unquantized(x), weights, ids, shared)

    def _forward_fused(self, x: Tensor) -> Tensor:
        """One call; a shared expert with a factor is added to it."""
        assert self.fused is not None
        ids = self.expert_ids_buffer(len(x))
        if ids is None:
            out = self.fused.run(x)
        else:
            out = self.fused.run(x, ids)
            self.record_expert_ids(ids)
        return out.add_(self._shared.forward(x)) if isinstance(self._shared, _WITH_FACTORS) else out

    @property
    def leaves_rows(self) -> bool:
        """True if `expert_rows` is supported, for a norm that sums them."""
        return self.fused is None and isinstance(self._routed, LocalExperts) and self._routed.leaves_rows

    def expert_rows(
        self, x: Activation, tokens: RoutedTokens | None = None, chosen: Choice | None = None
    ) -> ExpertRows:
        """`forward` before the sum over experts, if it `leaves_rows`."""
        assert isinstance(self._routed, LocalExperts)
        weights, ids = chosen or self._choose(x, tokens, "prefill")
        beside = self._beside(x, weights, ids)
        return self._routed.rows(as_format(x, self._routed.input_format), weights, ids, beside)

    def before_norm(
        self, norm: RMSNorm, x: Activation, residual: Tensor, phase: Phase, tokens: RoutedTokens | None = None,
        chosen: Choice | None = None,
    ) -> Any:  # fmt: skip
        """residual [T, D] += `forward` in place; the norm of it, whose launch also adds the shared experts' result and
        sums over the ranks, where the dispatcher supports it. For a norm that `adds_pairs`."""
        routed, overlap = self._routed, self._overlap
        if not isinstance(routed, DispatchedExperts):
            return norm.add(self.forward(x, phase, tokens, chosen), residual)
        weights, ids = chosen or self._choose(x, tokens, phase)
        stream = InlineStream() if overlap is None else overlap.comm_stream
        if overlap is not None and overlap.shared_expert:
            sent = routed.send(stream, x, weights, ids, phase)
            other = self._beside(x, weights, ids)
        else:
            other, stream = self._beside(x, weights, ids), InlineStream()
            sent = routed.dispatched(x, weights, ids, phase)
        if routed.norms_sums(phase):
            return norm.add_sum(routed.compute_norm(stream, sent, weights), residual, other)
        return norm.add(routed.compute(stream, sent, weights).wait(), residual, other)

    # -- an unrecorded pass over experts in their own slots, split before the experts; `before` takes tensors only

    @property
    def is_plain(self) -> bool:
        """True if `before` and `after` are currently equivalent to `forward`."""
        moved = self._tables is not None or self._table is not None
        return self.fused is None and self._overlap is None and not moved and not self._counting

    def before(self, x: Activation) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [T, D] -> weights and experts [T, K], and the shared expert's result [T, D]."""
        weights, ids = self._route(unquantized(x), self._gate, self._bias, self._spec)
        return weights, ids, self._beside(x, weights, ids)

    def after(self, x: Activation, weights: Tensor, ids: Tensor, shared: Tensor | None) -> Tensor:
        """[T, D]."""
        return self._routed.run(as_format(x, self._routed.input_format), weights, ids, shared)

    def _choose(self, x: Activation, tokens: RoutedTokens | None, phase: Phase) -> tuple[Tensor, Tensor]:
        """Weights and slots [T, K]; -1 for tokens that are not `real`."""
        real, experts = None if tokens is None else tokens.real, None
        if self._table is not None:
            assert tokens is not None, "a layer that chooses experts by token id needs the ids"
            experts = self._table.index_select(0, tokens.ids)
        early = real if self._tables is None else None  # tables map logical experts only
        wide = self._route_int64 if phase in self._int64 and not self._counting else None
        router = (unquantized(x), self._gate, self._bias, self._asked, early, experts)
        ahead = self.read_first if self._route_ahead is not None and wide is None else None
        if (images := self._images(tokens)) is not None:
            return self._in_slots(*self._by_kind(wide or self._route, router, images), real)
        if ahead is not None and self._route_ahead is not None:
            return self._in_slots(*self._route_ahead(*router, ahead), real)
        return self._in_slots(*(wide or self._route)(*router), real)

    def _images(self, tokens: RoutedTokens | None) -> Tensor | None:
        """Which tokens [T] have the router's other bias; None: none."""
        return None if tokens is None or self._image_bias is None else tokens.images

    def _by_kind(self, route: Callable[..., Choice], router: tuple[Any, ...], images: Tensor) -> Choice:
        """The choices for text and for `images` [T], by a route of all tokens for each."""
        x, gate, _, *more = router
        text, other = route(*router), route(x, gate, self._image_bias, *more)
        kind = images.unsqueeze(1)
        return torch.where(kind, other[0], text[0]), torch.where(kind, other[1], text[1])

    @property
    def _asked(self) -> RouterSpec:
        """What the router writes: experts instead of this rank's slots while they are counted."""
        return self._spec.of_all_ranks if self._counting and self._spec.num_shared else self._spec

    @property
    def _counting(self) -> bool:
        return self._recorder is not None and self._recorder.counting

    def _in_slots(self, weights: Tensor, ids: Tensor, real: Tensor | None) -> Choice:
        """The router's choice with slots instead of experts, recorded."""
        if self._tables is not None:
            ids = with_padding(self._tables.to_physical(self.layer_index, ids), real)
        if self._recorder is not None and self._recorder.counting:
            chosen = ids[:, : self._spec.top_k].contiguous()
            self._recorder.on_select(self.layer_index, chosen)
            if self._spec.held is not None and self._spec.num_shared:
                ids = with_padding(in_slots(chosen, self._spec), real)
        return weights, ids

    def stages(
        self, x: Activation, phase: Phase = "prefill", tokens: RoutedTokens | None = None, chosen: Choice | None = None
    ) -> Stages:
        """`forward` as a generator that yields during dispatch and combine, for overlap."""
        routed, overlap = self._routed, self._overlap
        if overlap is None or not isinstance(routed, DispatchedExperts):
            return self.forward(x, phase, tokens, chosen)
        weights, ids = chosen or self._choose(x, tokens, phase)
        sent = routed.send(overlap.comm_stream, x, weights, ids, phase)
        beside = self._beside(x, weights, ids)
        yield
        back = routed.compute(overlap.comm_stream, sent, weights)
        yield
        out = back.wait()
        return out if beside is None else out.add_(beside)
