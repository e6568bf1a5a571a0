"""The decoder common to all families: embedding, layers on a residual stream, final norm, head.

Legend: T tokens, S rows of logits, D hidden, V vocabulary.

The residual stream is one tensor [T, D] that every layer adds to in place; each norm is fused with the preceding
addition, so a layer ends with the next layer's (or the head's) input norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.backends import Backends
from moe_engine.kernels.decoder.decode_step import DecodeTables, FusedDecodeStep, fuse_decode_step
from moe_engine.kernels.indexer.in_place import decode_planner
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.attention.gqa import GQAttention
from moe_engine.models.layers.attention.mla import MLAAttention
from moe_engine.models.layers.attention.rope import StoredFactors, make_rotary_table
from moe_engine.models.layers.attention.step_adapters import StepAdapters
from moe_engine.models.layers.compiled_layer import CompiledLayer, for_regions
from moe_engine.models.layers.decoder_layer import DecoderLayer, FeedForward
from moe_engine.models.layers.embedding import EMBEDDING, Embedding, Head
from moe_engine.models.layers.feed_forward.mlp import MLP
from moe_engine.models.layers.feed_forward.moe import LayerRecorder, MoE
from moe_engine.models.layers.feed_forward.normed_experts import NormedMoE
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.models.layers.norm import LayerNorm, RMSNorm
from moe_engine.models.layers.overlap_stages import Stages, interleave
from moe_engine.models.layers.pooler import Pooler
from moe_engine.models.layers.residual.parallel_norm import ParallelNorm
from moe_engine.models.layers.residual.result_norm import ResultNorm, norm_names
from moe_engine.models.layers.sharded_layer import ShardedLayer, choose_communication, with_sizes
from moe_engine.models.layers.stack import LayerStack
from moe_engine.models.layers.streamed_layers import StreamedLayers
from moe_engine.models.needs import index_widths
from moe_engine.models.pooling import score_layers
from moe_engine.models.tensors.gqa import MLP_NORM
from moe_engine.models.tensors.model import HEAD_BIAS, ROTARY_FACTORS, expert_names
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.dp_gather_scatter import TokenLayout
from moe_engine.parallel.step_sizes import StepSizes

Result = TypeVar("Result")


class Reloadable(NamedTuple):
    """A module, the beginnings of the names of its tensors, and how it is built with the weights of a source."""

    prefixes: tuple[str, ...]
    module: Any
    build: Callable[[WeightSource], Any]


class Decoder:
    """`Model` of `models.batch` for every family; subclasses define a layer's attention and feed-forward.

    Tensors are read in layer order, and each is passed to its kernel before the next is read.
    """

    has_mtp = False
    """True if the family's checkpoints may have MTP layers, see `models.loader.load_mtp`."""
    max_image_tokens = 0
    """Most image tokens of a step."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightSource,
        backends: Backends,
        parallel: ParallelContext,
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        self.passes = 0
        """Number of forwards started so far, the same on all ranks."""
        self.at_layer = 0
        """The current (or last) layer of a forward; for progress reports."""
        self.backends = backends
        self.parallel = parallel
        positions = max_positions or config.context_length
        tables = partial(make_rotary_table, max_positions=positions, device=reader.device)
        self.rotary_tables = {rope: tables(rope) for rope in config.ropes if not rope.stored_factors}
        self._rotary_factors: Reloadable | None = None
        if config.rope.stored_factors:
            make = partial(StoredFactors, config.rope, positions)
            self._rotary_factors = Reloadable((ROTARY_FACTORS,), make(reader), make)
            self.rotary_tables[config.rope] = self._rotary_factors.module.table
        self.embedding = Embedding(config, reader, backends.ops, parallel)
        scale = config.embed_scale
        self._embed_scale = float(torch.tensor(scale, dtype=reader.dtype)) if config.rounds_scale else scale
        norms = [self.make_norm(reader, f"model.layers.{i}.input_layernorm") for i, _ in config.blocks]
        norms.append(self.make_norm(reader, "model.norm"))
        self._first_norm = norms[0]
        self.layers: list[DecoderLayer | CompiledLayer | ShardedLayer] = []
        streamed = StreamedLayers(backends.weight_stream)
        for i, (first, _) in enumerate(config.blocks):
            shared_out = any(layer.shares_out for layer in self.layers)
            self.layers.append(self.make_layer(first, reader, norms[i + 1], shared_out))
            streamed.take(i, self.layers[i])
        self._calls = streamed.calls(self.layers)
        for i, layer in enumerate(self.layers):
            if not config.parallel and (i == 0 or self.layers[i - 1].passes_on):
                norms[i].feed(layer.attention.input_format)
        self.stack = self.make_stack(norms[0])
        """All layers as one call, if the kernels support it."""
        self.head = self.make_head(reader, self.embedding)
        if backends.weight_stream is None:  # else weights are not there yet
            self._request_weights(norms)
        self.adapters: StepAdapters | None = None
        """LoRA adapters of the step; None without LoRA."""
        self.taps: HiddenTaps | None = None
        """Hidden states for an EAGLE-3 head; None without such a head."""
        self.weight_bytes = streamed.device_bytes(self)
        """Bytes of weights and tables in the kernels' layouts."""

    @property
    def rotary(self) -> RotaryTable:
        """The table of `ModelConfig.rope`."""
        return self.rotary_tables[self.config.rope]

    def rotary_of(self, layer_index: int) -> RotaryTable:
        return self.rotary_tables[self.config.rope_of(layer_index)]

    def _request_weights(self, norms: list[RMSNorm]) -> None:
        """Launches of few bytes request weights that are read behind them: norms those of the layers' first products
        and of the head, the products of values those of the shared experts."""
        pairs: list[tuple[Any, Tensor | None]] = []
        for norm, layer in zip(norms, self.layers):
            if isinstance(layer.attention, MLAAttention | GQAttention):
                pairs.append((norm, layer.attention.first_product.weight.memory))
            if isinstance(layer.attention, MLAAttention) and isinstance(layer.feed_forward, MoE):
                layer.attention.request_later(layer.feed_forward.read_first)
            if isinstance(layer.feed_forward, MLP):
                pairs.append((layer.post_norm, layer.feed_forward.weights[0].memory))
        if isinstance(self.head, Head):
            pairs.append((norms[-1], self.head.weight.memory))
        for norm, weight in pairs:
            if isinstance(norm, RMSNorm):  # others have no such launch
                norm.precedes(weight)

    def make_head(self, reader: WeightSource, embedding: Embedding) -> Head | Pooler:
        """The LM head; for a pooled model the pooler."""
        if self.config.pooling is not None:
            return Pooler(self.config, reader)
        return Head(self.config, reader, self.backends.linear, embedding, self.parallel)

    def make_norm(self, reader: WeightSource, prefix: str) -> Any:
        config, ops = self.config, self.backends.ops
        if config.result_norms is not None and (names := norm_names(prefix, config)) != ("", prefix, ""):
            return ResultNorm(ops, reader, names, config)
        if config.layer_norm:
            return LayerNorm(ops, reader, prefix, config.hidden_size, config.norm_eps, config.norm_bias)
        return RMSNorm(ops, reader, prefix, config.hidden_size, config.norm_eps, config.norm_plus)

    def make_layer(
        self, layer_index: int, reader: WeightSource, next_norm: RMSNorm, shared_out: bool = False
    ) -> DecoderLayer | CompiledLayer | ShardedLayer:
        """Loads ``model.layers.{layer_index}`` except its input norm, which the previous layer applies, with the
        feed-forward of `ModelConfig.feed_forward_of`.

        `shared_out`: the previous layer leaves each rank with its rows of the residual stream only.
        """
        attention = self.make_attention(layer_index, reader, self.rotary_of(layer_index))
        last, post, feed_forward = self.config.feed_forward_of(layer_index), next_norm, None
        if last is not None:
            post = self._make_post_norm(layer_index, last, reader)
            feed_forward = self.make_feed_forward(last, reader)
        if self.parallel.world_size == 1:
            layer = DecoderLayer(attention, post, feed_forward, next_norm)
            regions = self.backends.regions
            return layer if regions is None else CompiledLayer(layer, regions)
        tokens = TokenLayout.ALL if feed_forward is None else feed_forward.tokens
        comm = choose_communication(self.parallel, tokens, shared_out)
        return ShardedLayer(attention, post, feed_forward, next_norm, comm)

    def _make_post_norm(self, layer_index: int, last: int, reader: WeightSource) -> Any:
        if self.config.parallel:
            own = self.layers[-1].next_norm if self.layers else self._first_norm
            return ParallelNorm(self.backends.ops, reader, own, self.config)
        return self.make_norm(reader, self._post_norm(layer_index, last))

    def _post_norm(self, layer_index: int, last: int) -> str:
        """Name of the norm before the feed-forward of layer `last` after the layer's attention."""
        same = layer_index == last
        return f"model.layers.{last}.{'post_attention_layernorm' if same else 'input_layernorm'}"

    def modules(self) -> Iterator[Reloadable]:
        """All modules with weights, in the order of loading."""
        config = self.config
        head: tuple[str, ...] = ("lm_head.",)
        if config.pooling is not None:
            head = tuple(f"{layer.name}." for layer in score_layers(config))
        elif config.tie_word_embeddings:
            head = (EMBEDDING, HEAD_BIAS)
        if self._rotary_factors is not None:
            yield self._rotary_factors
        yield Reloadable((EMBEDDING,), self.embedding, self._make_embedding)
        first = "model.layers.0.input_layernorm"
        yield Reloadable(self.norm_prefixes(first), self._first_norm, partial(self.make_norm, prefix=first))
        layers = [first for first, _ in config.blocks]
        norms = [*(f"model.layers.{i}.input_layernorm" for i in layers[1:]), "model.norm"]
        for i, layer, norm in zip(layers, self.layers, norms):
            yield from self.layer_modules(i, layer, norm)
        yield Reloadable(head, self.head, self._make_head_again)

    def layer_modules(self, layer_index: int, layer: Any, next_norm: str) -> Iterator[Reloadable]:
        """`modules` of one layer; `next_norm`: name of its last norm."""
        name, last = f"model.layers.{layer_index}", self.config.feed_forward_of(layer_index)

        def attention(reader: WeightSource) -> Any:
            return self.make_attention(layer_index, reader, self.rotary_of(layer_index))

        own = (f"{name}.self_attn.", f"{name}.linear_attn.")
        yield Reloadable(own, layer.attention, attention)
        if last is not None:
            if not self.config.parallel:
                post = self._post_norm(layer_index, last)
                yield Reloadable(self.norm_prefixes(post), layer.post_norm, partial(self.make_norm, prefix=post))
            moe = self.config.moe
            inner = (MLP_NORM,) if moe is not None and moe.normed else ()
            parts = ("mlp", expert_names(self.config).block, *inner)
            blocks = tuple(f"model.layers.{last}.{part}." for part in parts)
            yield Reloadable(blocks, layer.feed_forward, partial(self.make_feed_forward, last))
        yield Reloadable(self.norm_prefixes(next_norm), layer.next_norm, partial(self.make_norm, prefix=next_norm))

    def norm_prefixes(self, prefix: str) -> tuple[str, ...]:
        """The beginnings of the names of the tensors that `make_norm` reads."""
        names = (prefix,) if self.config.result_norms is None else norm_names(prefix, self.config)
        return tuple(f"{name}." for name in names if name)

    def _make_embedding(self, reader: WeightSource) -> Embedding:
        return Embedding(self.config, reader, self.backends.ops, self.parallel)

    def _make_head_again(self, reader: WeightSource) -> Head | Pooler:
        tied = self.config.tie_word_embeddings
        return self.make_head(reader, self._make_embedding(reader) if tied else self.embedding)

    @property
    def moes(self) -> list[MoE]:
        """The MoE feed-forwards, in layer order."""
        return [layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoE)]

    def record(self, recorder: LayerRecorder | None) -> None:
        """Between passes: sets the recorder of all MoE layers' expert choices; None: no recording."""
        for moe in self.moes:
            moe.record(recorder)
        if self.stack is not None:
            self.stack.records_experts = any(moe.records_experts for moe in self.moes)

    def keep_unquantized(self) -> None:
        """Norms that quantize for their readers also keep the unquantized values, which adapters read."""
        norms = [self._first_norm]
        for layer in self.layers:
            norms += [layer.post_norm, layer.next_norm, *layer.attention.inner_norms]
        for norm in norms:
            norm.keep_unquantized()

    def make_stack(self, first_norm: RMSNorm) -> LayerStack | None:
        """All layers as one call, if the family's kernels support it."""
        return None

    def stack_of_layers(self, first_norm: RMSNorm) -> LayerStack | None:
        """`make_stack` of families whose layers and embedding are those of this package."""
        config, scaled = self.config, self.config.embed_scale != 1.0
        other_norms = config.layer_norm or config.parallel or config.result_norms
        if self.parallel.world_size > 1 or config.state_groups or other_norms or scaled:
            return None
        decoder = self.backends.attention.capabilities.decoder
        return LayerStack.of(decoder, self.embedding.weight, first_norm, self.layers)

    def decode_step(self, tables: DecodeTables) -> FusedDecodeStep | None:
        """Whole decode steps as one call; None if it is not supported."""
        changed = self.config.logit_cap or self.config.logit_scale != 1.0
        if self.stack is None or not isinstance(self.head, Head) or changed:
            return None
        return fuse_decode_step(self.stack.fused, self.head.weight, tables)

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        raise NotImplementedError

    def make_feed_forward(self, layer_index: int, reader: WeightSource) -> FeedForward:
        """An MLP, or experts."""
        config, layer = self.config, f"model.layers.{layer_index}"
        is_mtp = layer_index >= config.num_layers
        if config.is_mtp_moe if is_mtp else config.moe_layers[layer_index]:
            normed = config.moe is not None and config.moe.normed
            return (NormedMoE if normed else MoE)(config, layer_index, self.backends, reader, self.parallel)
        widths = config.hidden_size, config.intermediate_size
        own = config.mlp_bias, config.dense_activation
        return MLP.dense(self.backends, reader, self.parallel, f"{layer}.mlp", *widths, *own)

    def attention_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        """Attention arguments besides the hidden states; computed once per step on the host. `batch`: of `place`."""
        return (batch,)

    def step_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        """`attention_args` of the batch; on many ranks with the step's sizes set."""
        return self.attention_args(self.place(self.begin_step(batch)))

    def draft_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        """`step_args` of MTP layers."""
        return self.step_args(batch)

    def remember_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        """Arguments of attention's `remember` besides the hidden states."""
        return (self.place(batch),)

    def planner_of_decodes(self, drafts: bool = False) -> InPlacePlanner | None:
        """Plans of captured decodes, or of the draft steps of MTP layers; None: those of the attention backend."""
        index = index_widths(self.config)
        if index is None:
            return None
        return decode_planner(self.backends.attention, self.backends.indexer, index)  # type: ignore[arg-type]

    def begin_step(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch for all layers; on many ranks with the step's sizes set."""
        if self.parallel.world_size > 1:
            moe = self.config.moe
            hashes = moe is not None and moe.hash_layers > 0
            batch = with_sizes(batch, self.parallel, hashes, images=self.config.routes_images())
        elif self.backends.regions is not None:
            batch = for_regions(batch, self.backends.regions)
        if self.adapters is not None:
            self.adapters.begin(batch.adapters, batch.sizes)
        return batch

    def place(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with positions by which kernels read the rotary table."""
        return batch

    def embed(self, batch: ForwardBatch) -> Tensor:
        """The residual stream before the first layer, [T, D], new memory."""
        embedded = self.embedding(batch.input_ids)
        return embedded if self._embed_scale == 1.0 else embedded.mul_(self._embed_scale)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states after the final norm, [T, D]."""
        self.passes += 1
        args = self.step_args(batch)
        plain = self.adapters is None or not self.adapters.active
        if self.taps is not None and self.taps.active:
            return self._forward_tapped(self.taps, batch, *args)
        if self.stack is not None and plain and self.stack.takes(*args):
            return self.stack.forward(*args)
        residual = self.embed(batch)  # [T, D]
        hidden = self._first_norm(residual)
        for index, call in enumerate(self._calls):
            self.at_layer = index
            hidden = call(hidden, residual, *args)
        return hidden

    def fused_pass(self, run: Callable[[], Result | None]) -> Result | None:
        """Runs a pass without `forward`, which is none if its result is None."""
        result = run()
        if result is not None:
            self.passes += 1
        return result

    def _forward_tapped(self, taps: HiddenTaps, batch: ForwardBatch, *args: Any) -> Tensor:
        residual = self.embed(batch)
        taps.begin(self._first_norm.stream(residual))
        hidden = self._first_norm(residual)
        for index, call in enumerate(self._calls):
            self.at_layer = index
            taps.copy(index, self.layers, residual, args[0])
            hidden = call(hidden, residual, *args)
        taps.copy(len(self.layers), self.layers, residual, args[0])
        return hidden

    def forward_overlapped(self, batches: Sequence[ForwardBatch]) -> list[Tensor]:
        """`forward` of parts of a step (two-batch overlap): one part computes while another communicates."""
        self.passes += 1
        return interleave([self._stages(batch) for batch in batches])

    def _stages(self, batch: ForwardBatch) -> Stages:
        args = self.step_args(batch)
        residual = self.embed(batch)
        hidden = self._first_norm(residual)
        for index, layer in enumerate(self.layers):
            self.at_layer = index
            assert isinstance(layer, ShardedLayer)
            hidden = yield from layer.stages(hidden, residual, *args)
        return hidden

    def logits(self, hidden: Tensor, sizes: StepSizes | None = None, out: Tensor | None = None) -> Tensor:
        """hidden [S, D] -> [S, V] float32; for a pooled model the vectors of pooled states. `out`: see `Model`."""
        return self.head(hidden, sizes) if isinstance(self.head, Pooler) else self.head(hidden, sizes, out)
