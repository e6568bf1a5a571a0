"""DeepSeek V2, V2-Lite, V3, R1 and V3.1 (and Kimi K2, Moonlight): MLA with dense and mixture-of-experts layers.
DeepSeek V3.2 and GLM-5: the same with sparse attention.

The variants differ in the config only; see `config_families.parse_deepseek`.
"""

from __future__ import annotations

from typing import Any

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.layers.attention.gated_mla import GatedMLAAttention
from moe_engine.models.layers.attention.input_queries import InputSparseMLA
from moe_engine.models.layers.attention.mla import MLAAttention
from moe_engine.models.layers.attention.sparse_mla import SparseMLAAttention
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.stack import LayerStack
from moe_engine.models.step_memory import MAX_EXPANDED_TOKENS
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext


class DeepseekModel(Decoder):
    """`Model` of these families. `batch.kv[layer]` is the latent cache [num_slots, C+R], with index keys a pair."""

    has_mtp = True

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightSource,
        backends: Backends,
        parallel: ParallelContext,
        max_positions: int | None = None,
        max_expanded_tokens: int = MAX_EXPANDED_TOKENS,
    ) -> None:
        self._max_expanded_tokens = max_expanded_tokens
        super().__init__(config, reader, backends, parallel, max_positions)

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        attention, kind = self.config.attention, MLAAttention
        assert isinstance(attention, MLAConfig)
        if attention.indexer is not None:
            kind = InputSparseMLA if attention.indexer.from_input else SparseMLAAttention
        elif attention.gate_width:
            kind = GatedMLAAttention
        return kind(
            self.config,
            layer_index,
            reader,
            self.backends,
            self.parallel,
            rotary,
            max_expanded_tokens=self._max_expanded_tokens,
        )

    def make_stack(self, first_norm: RMSNorm) -> LayerStack | None:
        return self.stack_of_layers(first_norm)

    def attention_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        return batch, self.layers[self.config.kv_layers[0]].attention.chunks(batch)
