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

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.drafts.draft_layers import embed_next
from moe_engine.models.drafts.draft_vocabulary import own_head
from moe_engine.models.drafts.head_layers import HeadLayers
from moe_engine.models.eagle_config import LAYER, HeadConfig
from moe_engine.models.footprint import held_bytes
from moe_engine.models.layers.decoder import Decoder, Reloadable
from moe_engine.models.layers.embedding import Head
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.step_sizes import StepSizes


class EagleHead:
    """Implements `models.drafts.draft_layers.DraftLayers`.

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
        layer, ops, size = head.layer, backends.ops, head.layer.hidden_size
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
        self._layers = HeadLayers(layer, model, reader, backends, max_positions, head.attention_input)
        self._lm_head = lm_head or own_head(head, model, reader, backends.linear)
        self.weight_bytes = held_bytes(self, shared=model)
        """Bytes of the head in addition to the target, in the kernels' layouts."""

    def modules(self) -> Iterator[Reloadable]:
        """Empty: the head is unchanged when the target's weights are replaced."""
        return iter(())

    windowed = False

    @property
    def attends_to_extend(self) -> bool:
        """As `DraftLayers.attends_to_extend`."""
        return len(self._layers) > 1

    @property
    def feed_forwards(self) -> list[Any]:
        return [layer.feed_forward for layer in self._layers.layers]

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
        batch = self._layers.place(batch)
        x, stream = self._enter(embed_next(self._model, input_ids, batch), hidden)
        v = self._layers.run(x, stream, batch)
        return self._norm(v) if self._norm is not None and self.config.norms_output else v

    def join(self, layer: int, batch: ForwardBatch) -> Tensor:
        """Takes part in a draft step of other ranks with an empty batch: v [0, D], for its `logits`."""
        embedding = self._model.embedding(batch.input_ids)
        return self.forward(layer, batch.input_ids, embedding, batch)

    def remember(self, layer: int, input_ids: Tensor, hidden: Tensor, batch: ForwardBatch) -> None:
        """Only writes the cache, for tokens whose v is not needed. Arguments as in `forward`; `batch` needs no plan
        unless the head `attends_to_extend`."""
        x, stream = self._enter(embed_next(self._model, input_ids, batch), hidden)
        batch = self._layers.place(batch)
        if self.attends_to_extend:
            x = self._layers.run(x, stream, batch, slice(-1))
        self._layers.layers[-1].attention.remember(x, batch)

    def logits(self, v: Tensor, sizes: StepSizes | None = None, layer: int = 0) -> Tensor:
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


def _load_fc(head: HeadConfig, reader: WeightSource, backends: Backends) -> Any:
    if not head.has_fc:
        return None
    return load_linear(backends.linear, reader, ["fc"], [head.layer.hidden_size], head.joined_width, head.has_bias)
