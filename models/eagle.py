"""EAGLE heads: decoder layers, of which published heads have one, that draft from the hidden states of a model (the
target).

Legend: T tokens, S rows, D hidden, F width of the target's states, V vocabulary, W draft vocabulary.

At position i a head takes the target's state at i and the token i+1, and predicts the token i+2:

    EAGLE-1, -2    z = fc([embedding(token i+1) | hidden i]);  v = layer(z), without an input norm;  logits head(v)
    EAGLE-3        x = fc(hidden states of three layers at i);  u = [input_norm(embedding(token i+1)) | hidden_norm(x)]
                   v = x + attention(u), then the MLP as usual;  logits head(norm(v)) over the draft vocabulary

The next draft step takes v instead of the hidden state (EAGLE-3: of x). Further layers are usual decoder layers.
The embedding is the target's. The layers' keys and values follow those of the target's layers in the KV pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import MLAConfig
from moe_engine.models.draft_layers import embed_next
from moe_engine.models.eagle_config import LAYER, LAYERS, HeadConfig
from moe_engine.models.footprint import held_bytes
from moe_engine.models.layers.axis_rows import AxisRows
from moe_engine.models.layers.decoder import Decoder, Reloadable
from moe_engine.models.layers.decoder_layer import DecoderLayer
from moe_engine.models.layers.embedding import Head
from moe_engine.models.layers.gqa import GQAttention, group_inputs
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.layers.mla import MLAAttention
from moe_engine.models.layers.mlp import MLP
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.rope import make_rotary_table
from moe_engine.models.layers.sharded_layer import ShardedLayer, choose_communication, with_sizes
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.step_sizes import StepSizes


class EagleHead:
    """Implements `models.draft_layers.DraftLayers`.

    Args:
        model: the target, whose ranks share the head's layer as they share its own layers.
        backends: kernels for the head's attention.
        ids: the target's ids [W] of the draft vocabulary, ascending; None: it is the target's vocabulary.
        lm_head: LM head over the draft vocabulary; None: the target's.
        max_positions: max positions of requests.
    """

    num_layers = 1
    fuses_drafts = False
    shares_selection = False

    def __init__(
        self,
        head: HeadConfig,
        model: Decoder,
        reader: WeightSource,
        backends: Backends,
        max_positions: int,
        ids: Tensor | None = None,
        lm_head: Head | None = None,
    ) -> None:
        self.config = head
        self.ids = ids
        self._model = model
        self._backends = backends
        layer, ops, size = head.layer, backends.ops, head.layer.hidden_size
        self._parallel = parallel = replace(model.parallel, all_reduce=None)  # its own sums end in norms
        self._fc = _load_fc(head, reader, backends)
        self._state_norms = [
            RMSNorm(ops, reader, f"fc_norm.{i}", head.target_hidden, layer.norm_eps)
            for i in range(head.num_states if head.norms_states else 0)
        ]
        self._joined_norm: RMSNorm | None = None
        if head.norms_joined:
            self._joined_norm = RMSNorm(ops, reader, "input_norm", head.num_states * head.target_hidden, layer.norm_eps)
        self._embedding_norm = self._hidden_norm = self._norm = None
        if head.is_eagle3:
            self._embedding_norm = RMSNorm(ops, reader, f"{LAYER}.input_layernorm", size, layer.norm_eps)
            self._hidden_norm = RMSNorm(ops, reader, f"{LAYER}.hidden_norm", size, layer.norm_eps)
            self._norm = RMSNorm(ops, reader, "norm", size, layer.norm_eps)
        self._load_layers(reader, max_positions)
        if lm_head is None and head.own_head:
            own = replace(layer, vocab_size=head.own_head, tie_word_embeddings=False)
            lm_head = Head(own, reader, backends.linear, model.embedding, parallel)
        self._lm_head = lm_head
        self.weight_bytes = held_bytes(self, shared=model)
        """Bytes of the head in addition to the target, in the kernels' layouts."""

    def _load_layers(self, reader: WeightSource, max_positions: int) -> None:
        layer, ops = self.config.layer, self._backends.ops
        more = self._model.max_image_tokens if layer.rope.axes else 0
        rotary = make_rotary_table(layer.rope, max_positions + more, reader.device)
        self._axis_rows = AxisRows(rotary, max_positions, layer.rope.axes) if more else None
        form = MLAAttention if isinstance(layer.attention, MLAConfig) else GQAttention
        names = [f"{LAYERS}.{i}" for i in range(layer.num_layers)]
        size, widths = layer.hidden_size, (layer.hidden_size, layer.intermediate_size)
        nexts: list[Any] = [RMSNorm(ops, reader, f"{name}.input_layernorm", size, layer.norm_eps) for name in names[1:]]
        self._layers: list[DecoderLayer | ShardedLayer] = []
        for i, (name, last) in enumerate(zip(names, [*nexts, _NoNorm()])):
            attention = form(
                layer, self._model.config.num_layers + i, reader, self._backends, self._parallel, rotary,
                layer_name=name, input_size=None if i else self.config.attention_input,
            )  # fmt: skip
            post = RMSNorm(ops, reader, f"{name}.post_attention_layernorm", size, layer.norm_eps)
            mlp = MLP.dense(self._backends, reader, self._parallel, f"{name}.mlp", *widths, layer.mlp_bias)
            shared_out = any(layer.shares_out for layer in self._layers)
            self._layers.append(_join(attention, post, mlp, last, self._parallel, shared_out))

    def modules(self) -> Iterator[Reloadable]:
        """Empty: the head is unchanged when the target's weights are replaced."""
        return iter(())

    @property
    def attends_to_extend(self) -> bool:
        """As `DraftLayers.attends_to_extend`."""
        return len(self._layers) > 1

    @property
    def feed_forwards(self) -> list[Any]:
        return [layer.feed_forward for layer in self._layers]

    def prepare(self, states: Tensor) -> Tensor:
        """The target's states [T, F] (of several layers side by side) -> [T, D], hidden states of `forward`."""
        if not self.config.is_eagle3 or self._fc is None:
            return states
        if self._joined_norm is not None:
            states = self._joined_norm(states)
        if self._state_norms:
            parts = states.split(self.config.target_hidden, dim=1)
            states = torch.cat([norm(part) for norm, part in zip(self._state_norms, parts)], dim=1)
        return self._fc(states)

    def forward(
        self, layer: int, input_ids: Tensor, hidden: Tensor, batch: ForwardBatch, selection: object = None
    ) -> Tensor:
        """One draft step, or a draft extend.

        Args:
            layer: 0.
            input_ids: [T] int64, the token that follows each hidden state (`batch.input_ids` is ignored).
            hidden: [T, D], from `prepare` or of the draft step before; not changed.
            batch: positions and slots of the hidden states, planned for the head's attention backend.

        Returns:
            v [T, D]: input of `logits`, and hidden state of the next draft step.
        """
        if self._parallel.world_size > 1:
            batch = with_sizes(batch, self._parallel)
        x, stream = self._enter(embed_next(self._model, input_ids, batch), hidden)
        v = self._run(self._layers, x, stream, self._place(batch))
        return self._norm(v) if self._norm is not None and self.config.norms_output else v

    def join(self, batch: ForwardBatch) -> Tensor:
        """Takes part in a draft step of other ranks with an empty batch: v [0, D], for its `logits`."""
        embedding = self._model.embedding(batch.input_ids)
        return self.forward(0, batch.input_ids, embedding, batch)

    def remember(self, layer: int, input_ids: Tensor, hidden: Tensor, batch: ForwardBatch) -> None:
        """Only writes the cache, for tokens whose v is not needed. Arguments as in `forward`; `batch` needs no plan
        unless the head `attends_to_extend`."""
        x, stream = self._enter(embed_next(self._model, input_ids, batch), hidden)
        *first, last = self._layers
        batch = self._place(batch)
        if first:
            if self._parallel.world_size > 1:
                batch = with_sizes(batch, self._parallel)
            x = self._run(first, x, stream, batch)
        last.attention.remember(x, batch)

    def _run(self, layers: Sequence[Any], x: Tensor, stream: Tensor, batch: ForwardBatch) -> Tensor:
        """x: input of the first layer's attention -> what the norm after the last one makes of the stream."""
        attention = layers[0].attention
        if isinstance(attention, MLAAttention):
            args: Any = attention.chunks(batch)
        else:
            args = group_inputs(batch, self.config.layer.cache_groups, self._backends.attention)  # type: ignore[arg-type]
        for layer in layers:
            x = layer.forward(x, stream, batch, args)
        return x

    def _place(self, batch: ForwardBatch) -> ForwardBatch:
        return batch if self._axis_rows is None else self._axis_rows.place(batch)

    def logits(self, v: Tensor, sizes: StepSizes | None = None) -> Tensor:
        """v [S, D] -> [S, W] float32. `sizes` as in `Model.logits`."""
        if self._norm is not None and not self.config.norms_output:
            v = self._norm(v)
        return self._model.logits(v, sizes) if self._lm_head is None else self._lm_head(v, sizes)

    def _enter(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the attention, and the residual stream [T, D], in new memory."""
        if self._embedding_norm is None or self._hidden_norm is None:
            assert self._fc is not None
            stream = self._fc(torch.cat((embedding, hidden), dim=1))
            return stream, stream
        normed = self._hidden_norm(hidden)
        x = torch.cat((self._embedding_norm(embedding), normed), dim=1)
        return x, normed if self.config.norms_residual else hidden.clone()


class _NoNorm:
    """Replaces the norm after a layer: returns the residual stream itself."""

    adds_rows = adds_pairs = False

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Tensor:
        return residual.add_(x)


def _load_fc(head: HeadConfig, reader: WeightSource, backends: Backends) -> Any:
    if not head.has_fc:
        return None
    size = head.layer.hidden_size
    width = head.num_states * head.target_hidden if head.is_eagle3 else size + head.target_hidden
    return load_linear(backends.linear, reader, ["fc"], [size], width, head.has_bias)


def _join(
    attention: Any, post: RMSNorm, mlp: MLP, last: Any, parallel: ParallelContext, shared_out: bool
) -> DecoderLayer | ShardedLayer:
    if parallel.world_size == 1:
        return DecoderLayer(attention, post, mlp, last)
    return ShardedLayer(attention, post, mlp, last, choose_communication(parallel, mlp.tokens, shared_out))
