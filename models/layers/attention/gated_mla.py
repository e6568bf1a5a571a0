"""Multi-head latent attention with an output gate: a head's result is multiplied by the sigmoid of a number that the
layer's input gives (Ling), or each channel of it (Kimi K3).

Legend: T tokens, D hidden, H heads of this rank, V v_head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, common_format
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.layers.attention.mla import MLAAttention
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.weights import WeightSource


class GatedMLAAttention(MLAAttention):
    """`MLAAttention` with the projection `g_proj` [H, D] or [H V, D]. No whole-layer call has the gate."""

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends, *others: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(config, layer_index, reader, backends, *others, **options)
        assert isinstance(config.attention, MLAConfig)
        name, mla = f"model.layers.{layer_index}.self_attn.g_proj", config.attention
        rows = [mla.num_heads * mla.gate_width]
        self._gate = load_linear(backends.linear, reader, [name], rows, config.hidden_size, out_shares=[self._share])

    def _quantize_values(self) -> None:
        return None

    def _fuse(self) -> None:
        return None

    @property
    def input_format(self) -> ActivationFormat:
        return common_format(super().input_format, self._gate.input_format)

    def forward(self, hidden: Activation, batch: ForwardBatch, chunks: list[AttentionChunk] | None = None) -> Tensor:
        values = self._values(hidden, batch, self.chunks(batch) if chunks is None else chunks)  # [T, H, V]
        gate, gates = self._gate(hidden).unflatten(1, (-1, self._mla.gate_width)), self._ops.capabilities.gates
        opened = values.mul_(gate.sigmoid()) if gates is None else gates.heads(values, gate)
        return self._o(opened.flatten(1))
