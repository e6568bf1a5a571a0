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
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.decoder_layer import FeedForward
from moe_engine.models.layers.input_queries import InputSparseMLA
from moe_engine.models.layers.mla import MLAAttention
from moe_engine.models.layers.mlp import MLP
from moe_engine.models.layers.moe import MoE
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.sparse_mla import SparseMLAAttention
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

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> MLAAttention:
        attention, kind = self.config.attention, MLAAttention
        if isinstance(attention, MLAConfig) and attention.indexer is not None:
            kind = InputSparseMLA if attention.indexer.from_input else SparseMLAAttention
        return kind(
            self.config,
            layer_index,
            reader,
            self.backends,
            self.parallel,
            rotary,
            max_expanded_tokens=self._max_expanded_tokens,
        )

    def make_feed_forward(self, layer_index: int, reader: WeightSource) -> FeedForward:
        config = self.config
        is_mtp = layer_index >= config.num_layers
        is_moe = config.is_moe if is_mtp else config.moe_layers[layer_index]
        if is_moe:
            return MoE(config, layer_index, self.backends, reader, self.parallel)
        widths = config.hidden_size, config.intermediate_size
        name, form = f"model.layers.{layer_index}.mlp", config.dense_activation
        return MLP.dense(self.backends, reader, self.parallel, name, *widths, activation=form)

    def make_stack(self, first_norm: RMSNorm) -> LayerStack | None:
        return self.stack_of_layers(first_norm)

    def attention_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        return batch, self.layers[self.config.kv_layers[0]].attention.chunks(batch)
