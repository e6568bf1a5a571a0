"""Multi-token prediction: DeepSeek V3's draft layers after the last main layer.

Legend: T tokens, S rows, D hidden, V vocabulary, M MTP layers.

Layer j takes the hidden state at position i (the main model's after its final norm, or the previous draft step's
result) and the following token, and predicts the token after that (DeepSeek-V3 report, arXiv 2412.19437):

    z = eh_proj([enorm(embedding(token i+1)) | hnorm(hidden i)])      the embedding comes first
    v = shared_head.norm(decoder_layer(z))                            logits for token i+2: head(v)

In the next draft step, v is the hidden state: it is normed in the same way as the main model's hidden states. Layers
that read the residual (`MTPForm`) take it before the final norm, and v is their own, whose norm the head reads.
`models.drafts.stream_mtp` has the layers of models with several residual streams.
Embedding, rotary tables and, unless a layer has its own, the head are the main model's; the checkpoint's copies of
embedding and head are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.decoder.chain import FusedDrafts
from moe_engine.kernels.decoder.draft_step import fuse_draft_step
from moe_engine.kernels.decoder.drafting import ChainSteps, DraftLevel, RowTables, StepDraws, VerifiedChains
from moe_engine.kernels.decoder.layers import MAX_TOKENS
from moe_engine.kernels.sampling.protocol import SamplingParameters
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import MLAConfig
from moe_engine.models.drafts.draft_layers import embed_next
from moe_engine.models.drafts.mtp_layer import JoiningLayer, ResidualOnly
from moe_engine.models.drafts.stream_mtp import StreamMTPLayer
from moe_engine.models.footprint import held_bytes
from moe_engine.models.layers.attention.sparse_chunks import SharedSelection
from moe_engine.models.layers.decoder import Decoder, Reloadable
from moe_engine.models.layers.embedding import Head
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.tensors.model import MTP_HEAD
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.step_sizes import StepSizes

FusedStepCall = Callable[[np.ndarray, int, StepDraws | None], VerifiedChains]
"""rows [R] int64, drafts per row, sampling -> verification results."""


class MTPLayers:
    """The M MTP layers of a checkpoint, with the embedding and, unless they have their own, the head of their `model`.

    Their caches follow the model's: ``batch.kv[i] for i in kv_layers``, of the same type. Implements `DraftLayers`.
    """

    ids: Tensor | None = None
    attends_to_extend = False

    def __init__(self, model: Decoder, reader: WeightSource) -> None:
        first, count = model.config.num_layers, model.config.num_nextn_predict_layers
        self.kv_layers = range(first, first + count)
        self._model = model
        form = MTPLayer if model.config.draft_streams is None else StreamMTPLayer
        self.windowed = bool(model.config.windowed_drafts)
        self._layers: list[JoiningLayer] = [form(model, index, reader) for index in self.kv_layers]
        self.weight_bytes = held_bytes(self, shared=model)
        """Bytes of the layers in addition to the model, in the kernels' layouts."""
        self._fused = self._fuse()

    def modules(self) -> Iterator[Reloadable]:
        """As `Decoder.modules`."""
        for index, layer in zip(self.kv_layers, self._layers):
            yield from layer.modules(self._model, index)

    def _fuse(self) -> FusedDrafts | None:
        """Draft chains in one call; None if not supported."""
        model = self._model
        decoder = model.backends.attention.capabilities.decoder
        levels = [level for level in (layer.level() for layer in self._layers) if level is not None]
        if decoder is None or model.parallel.world_size > 1 or len(levels) < len(self._layers):
            return None
        assert isinstance(model.head, Head)
        return decoder.fuse_drafts(levels, model.embedding.weight, model.head.weight)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def planner(self) -> InPlacePlanner | None:
        """Plans of captured draft steps; None: those of the attention backend."""
        return self._model.planner_of_decodes(drafts=True)

    @property
    def reads_residual(self) -> bool:
        """See `ModelConfig.drafts_read_residual`."""
        return self._model.config.drafts_read_residual

    @property
    def state_width(self) -> int:
        """See `ModelConfig.draft_state_width`."""
        return self._model.config.draft_state_width

    def prepare(self, states: Tensor) -> Tensor:
        """Hidden states for `forward`: the states, or the streams alone of a residual with streams."""
        return states[:, : self.state_width].contiguous() if self.reads_residual else states

    @property
    def feed_forwards(self) -> list[Any]:
        return [layer.feed_forward for layer in self._layers]

    @property
    def shares_selection(self) -> bool:
        """True if the draft steps of a chain after the first attend to the tokens that the first one selected."""
        attention = self._model.config.attention
        return isinstance(attention, MLAConfig) and attention.indexer is not None and attention.indexer.shares_drafts

    def forward(
        self,
        layer: int,
        input_ids: Tensor,
        hidden: Tensor,
        batch: ForwardBatch,
        selection: SharedSelection | None = None,
    ) -> Tensor:
        """One step of one layer, over any tokens valid in a step of the main model.

        Args:
            layer: 0 <= layer < M.
            input_ids: [T] int64, the token that follows each hidden state (`batch.input_ids` is ignored); of image
                tokens `batch.next_images` is read instead.
            hidden: [T, `state_width`], not changed.
            batch: positions and slots of the hidden states; its attention reads this layer's earlier cache rows.
            selection: of the draft chain, if the layers share it (`shares_selection`).

        Returns:
            v [T, `state_width`]: input of `logits`, and hidden state of the next draft step.
        """
        model = self._model
        args = model.draft_args(batch)
        if selection is not None:
            args = (*args[:-1], selection.apply(args[-1]))
        return self._layers[layer].forward(embed_next(model, input_ids, batch), hidden, *args)

    def join(self, layer: int, batch: ForwardBatch) -> Tensor:
        """Takes part in a draft step of other ranks with an empty batch: v of no tokens, for its `logits`."""
        hidden = self._model.embedding(batch.input_ids).new_empty(0, self.state_width)
        return self.forward(layer, batch.input_ids, hidden, batch)

    def remember(self, layer: int, input_ids: Tensor, hidden: Tensor, batch: ForwardBatch) -> None:
        """Only writes the cache of a layer, for tokens whose v is not needed. Arguments as in `forward`."""
        if self._fused is not None and len(input_ids) <= MAX_TOKENS and batch.next_images is None:
            cache = batch.kv[self.kv_layers[layer]]
            self._fused.remember(layer, input_ids, hidden, batch.positions, batch.slots, cache)
            return
        embedding = embed_next(self._model, input_ids, batch)
        self._layers[layer].remember(embedding, hidden, *self._model.remember_args(batch))

    @property
    def fuses_drafts(self) -> bool:
        """True if `draft_chain` is available: a kernel drafts whole chains."""
        return self._fused is not None

    def draft_chain(
        self,
        states: Tensor,
        rows: Tensor,
        roots: Tensor,
        steps: ChainSteps,
        kv: Sequence[Any],
        parameters: SamplingParameters | None,
        uniform: Tensor | None,
    ) -> Tensor:
        """roots [R] -> [R, 1+S], each root and its drafts, identical to repeated `forward`, `logits` and sampling.

        Args:
            states, rows: states[rows[r]] is the hidden state of root r, see `FusedDrafts.run`.
            kv: the caches of model and MTP layers, see `ForwardBatch.kv`.
            parameters, uniform: sampling, see `FusedDrafts.run`.
        """
        assert self._fused is not None
        caches = [kv[i] for i in self.kv_layers]
        return self._fused.run(states, rows, roots, steps, caches, parameters, uniform)

    def fused_step(self, tables: RowTables, kv: Sequence[Any]) -> FusedStepCall | None:
        """A call that runs a whole draft-chain step, see `FusedDraftStep.run`; None if it is not supported.

        It does not record expert choices.
        """
        stack = self._model.stack
        if self._fused is None or stack is None:
            return None
        step = fuse_draft_step(self._fused, stack.fused, tables, kv)
        return None if step is None else step.run

    def logits(self, v: Tensor, sizes: StepSizes | None = None, layer: int = 0) -> Tensor:
        """v [S, `state_width`] of a layer -> [S, V] float32. `sizes` as in `Model.logits`."""
        own = self._layers[layer]
        return (own.head or self._model.logits)(own.output(v), sizes)


class MTPLayer(JoiningLayer):
    """embedding [T, D] of the next tokens, hidden [T, D] -> v [T, D]."""

    def __init__(self, model: Decoder, layer_index: int, reader: WeightSource) -> None:
        name, size, form = f"model.layers.{layer_index}", model.config.hidden_size, model.config.mtp
        self._embedding_norm = model.make_norm(reader, f"{name}.enorm")
        self._hidden_norm = model.make_norm(reader, f"{name}.hnorm")
        self._project = load_linear(model.backends.linear, reader, [f"{name}.eh_proj"], [size], 2 * size)
        self._input_norm = model.make_norm(reader, f"{name}.input_layernorm")
        self._output_norm = model.make_norm(reader, f"{name}.shared_head.norm")
        self._passes_residual, self._hidden_first = form.reads_residual, form.hidden_first
        next_norm: Any = ResidualOnly(self._output_norm) if self._passes_residual else self._output_norm
        self._decoder = model.make_layer(layer_index, reader, next_norm)
        self._input_norm.feed(self._decoder.attention.input_format)
        self.head = self._make_head(model, layer_index, reader) if form.own_heads else None

    def _make_head(self, model: Decoder, layer_index: int, reader: WeightSource) -> Head:
        name = f"model.layers.{layer_index}.{MTP_HEAD}"
        return Head(model.config, reader, model.backends.linear, model.embedding, model.parallel, name)

    def output(self, v: Tensor) -> Tensor:
        return self._output_norm(v) if self._passes_residual else v

    def modules(self, model: Decoder, layer_index: int) -> Iterator[Reloadable]:
        name, size = f"model.layers.{layer_index}", model.config.hidden_size

        def project(reader: WeightSource) -> Any:
            return load_linear(model.backends.linear, reader, [f"{name}.eh_proj"], [size], 2 * size)

        norms = (("enorm", self._embedding_norm), ("hnorm", self._hidden_norm), ("input_layernorm", self._input_norm))
        for norm, module in norms:
            yield Reloadable((f"{name}.{norm}.",), module, partial(model.make_norm, prefix=f"{name}.{norm}"))
        yield Reloadable((f"{name}.eh_proj.",), self._project, project)
        *inner, _ = model.layer_modules(layer_index, self._decoder, last := f"{name}.shared_head.norm")
        yield from inner
        yield Reloadable(model.norm_prefixes(last), self._output_norm, partial(model.make_norm, prefix=last))
        if self.head is not None:
            yield Reloadable((f"{name}.{MTP_HEAD}.",), self.head, partial(self._make_head, model, layer_index))

    def level(self) -> DraftLevel | None:
        decoder, part = self._decoder, self._decoder.feed_forward
        attention, experts = decoder.attention.fused, part.in_one_call if isinstance(part, MoE) else None
        if attention is None or experts is None or self._hidden_first:
            return None
        return DraftLevel(
            embedding_norm=self._embedding_norm.weight,
            hidden_norm=self._hidden_norm.weight,
            project=self._project.weight,
            input_norm=self._input_norm.weight,
            attention=attention,
            post_norm=decoder.post_norm.weight,
            experts=experts,
            final_norm=decoder.next_norm.weight,
            eps=self._input_norm.eps,
        )

    def _join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        parts = self._embedding_norm(embedding), self._hidden_norm(hidden)
        return self._project(torch.cat(parts[::-1] if self._hidden_first else parts, dim=-1))  # of [T, 2D]
