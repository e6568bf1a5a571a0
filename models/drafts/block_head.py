"""Draft heads that fill in a block of tokens in one forward: DFlash and DSpark (`models.config_sections.block`).

Legend: T tokens, S rows, D hidden, F width of the target's states, W draft vocabulary.

Keys and values of a computed token come from the target's states of several layers, x = hidden_norm(fc(states)), in
every layer of the head: no layer runs for them. A block is the last token with mask tokens after it. Its tokens attend
to all tokens before the block and to each other in both directions; a layer with a window is causal, and each token
sees the last positions up to its own. Logits are those of the LM head on norm(v). The embedding is the
target's, and the LM head too unless the head drafts fewer tokens.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config_sections.block import BlockConfig
from moe_engine.models.drafts.draft_vocabulary import own_head
from moe_engine.models.drafts.head_layers import HeadLayers
from moe_engine.models.drafts.markov_head import MarkovHead
from moe_engine.models.eagle_config import LAYER, HeadConfig
from moe_engine.models.footprint import held_bytes
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.step_sizes import StepSizes


class BlockLayers(Protocol):
    """Layers that fill in blocks.

    Attributes:
        markov: of DSpark.
        ids: the target's ids [W] int64 of the draft vocabulary; None: it is the target's vocabulary.
        visible: the batch of `forward` has `PagedQueries.visible`, so that the tokens of a block see each other.
        windows: of the layers' queries; None, the first, is that of the batch.
        weight_bytes: in addition to the target, in the kernels' layouts.
    """

    block: BlockConfig
    markov: MarkovHead | None
    ids: Tensor | None
    visible: bool
    windows: tuple[int | None, ...]
    weight_bytes: int

    def remember(self, states: Tensor, batch: ForwardBatch) -> None: ...

    def forward(self, batch: ForwardBatch) -> Tensor: ...

    def logits(self, v: Tensor, sizes: StepSizes | None = None, /) -> Tensor: ...


class BlockHead:
    """Implements `BlockLayers`. A head for a loaded `model` (the target), whose ranks share its layers.

    Args:
        backends: kernels for the head's attention.
        max_positions: max positions of requests.
        ids: as in `BlockLayers`.
    """

    def __init__(
        self,
        head: HeadConfig,
        model: Decoder,
        reader: WeightSource,
        backends: Backends,
        max_positions: int,
        ids: Tensor | None = None,
    ) -> None:
        assert head.block is not None
        self.block: BlockConfig = head.block
        self.ids: Tensor | None = ids
        self.visible = not self.block.is_causal
        others = (group.window for group in head.layer.cache_groups if group.window is not None)
        self.windows: tuple[int | None, ...] = (None, *others)
        self._model = model
        layer, ops = head.layer, backends.ops
        size, eps = layer.hidden_size, layer.norm_eps
        self._fc = load_linear(backends.linear, reader, ["fc"], [size], head.joined_width)
        self._hidden_norm = RMSNorm(ops, reader, "hidden_norm", size, eps)
        self._input_norm = RMSNorm(ops, reader, f"{LAYER}.input_layernorm", size, eps)
        last = RMSNorm(ops, reader, "norm", size, eps)
        self._layers = HeadLayers(layer, model, reader, backends, max_positions, last_norm=last)
        self.markov: MarkovHead | None = None
        if self.block.markov_rank:
            self.markov = MarkovHead(self.block, reader, size, layer.vocab_size, draft_vocab=head.draft_vocab)
        self._lm_head = own_head(head, model, reader, backends.linear)
        self.weight_bytes = held_bytes(self, shared=model)
        """Bytes of the head in addition to the target, in the kernels' layouts."""

    def remember(self, states: Tensor, batch: ForwardBatch) -> None:
        """Writes the keys and values of computed tokens.

        Args:
            states: [T, F], the target's states, of several layers side by side.
            batch: positions and slots of the tokens; without a plan.
        """
        x = self._hidden_norm(self._fc(states))
        batch = self._layers.place(batch)
        for layer in self._layers.layers:
            layer.attention.remember(x, batch)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Blocks of tokens -> v [T, D]. `batch` is planned for the head's attention, with `PagedQueries.visible`."""
        batch = self._layers.place(batch)
        stream = self._model.embedding(batch.input_ids)
        return self._layers.run(self._input_norm(stream), stream, batch)

    def logits(self, v: Tensor, sizes: StepSizes | None = None) -> Tensor:
        """v [S, D] -> [S, W] float32, without the bias of `markov`. `sizes` as in `Model.logits`."""
        return self._model.logits(v, sizes) if self._lm_head is None else self._lm_head(v, sizes)
