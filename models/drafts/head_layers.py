"""The decoder layers of a draft head, which the ranks of its model share as they share the model's own layers.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.eagle_config import LAYERS
from moe_engine.models.layers.attention.axis_rows import AxisRows
from moe_engine.models.layers.attention.gqa import GQAttention, group_inputs
from moe_engine.models.layers.attention.mla import MLAAttention
from moe_engine.models.layers.attention.rope import make_rotary_table
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.decoder_layer import DecoderLayer
from moe_engine.models.layers.feed_forward.mlp import MLP
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.sharded_layer import ShardedLayer, choose_communication, with_sizes
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext


class HeadLayers:
    """Layers whose caches follow those of the `model`'s layers in the KV pool.

    Args:
        config: a model of these layers.
        max_positions: max positions of requests.
        input_size: width of the first layer's input; None: D.
        last_norm: takes the residual stream after the last layer; None: the stream itself is the result.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: Decoder,
        reader: WeightSource,
        backends: Backends,
        max_positions: int,
        input_size: int | None = None,
        last_norm: RMSNorm | None = None,
    ) -> None:
        self._config = config
        self._backends = backends
        self._parallel = parallel = replace(model.parallel, all_reduce=None)  # its own sums end in norms
        ops = backends.ops
        more = model.max_image_tokens if config.rope.axes else 0
        rotary = make_rotary_table(config.rope, max_positions + more, reader.device)
        self._axis_rows = AxisRows(rotary, max_positions, config.rope.axes) if more else None
        form = MLAAttention if isinstance(config.attention, MLAConfig) else GQAttention
        names = [f"{LAYERS}.{i}" for i in range(config.num_layers)]
        size, widths = config.hidden_size, (config.hidden_size, config.intermediate_size)
        nexts: list[Any] = [
            RMSNorm(ops, reader, f"{name}.input_layernorm", size, config.norm_eps) for name in names[1:]
        ]
        self.layers: list[DecoderLayer | ShardedLayer] = []
        for i, (name, last) in enumerate(zip(names, [*nexts, last_norm or _NoNorm()])):
            number = {} if form is MLAAttention else {"number": i}
            attention = form(
                config, model.config.num_layers + i, reader, backends, parallel, rotary,
                layer_name=name, input_size=None if i else input_size, **number,
            )  # fmt: skip
            post = RMSNorm(ops, reader, f"{name}.post_attention_layernorm", size, config.norm_eps)
            mlp = MLP.dense(backends, reader, parallel, f"{name}.mlp", *widths, config.mlp_bias)
            shared_out = any(layer.shares_out for layer in self.layers)
            self.layers.append(_join(attention, post, mlp, last, parallel, shared_out))

    def __len__(self) -> int:
        return len(self.layers)

    def place(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with the sizes of a step of several ranks, and with positions for a rotary table of several
        axes."""
        if self._parallel.world_size > 1:
            batch = with_sizes(batch, self._parallel)
        return batch if self._axis_rows is None else self._axis_rows.place(batch)

    def run(self, x: Tensor, stream: Tensor, batch: ForwardBatch, layers: slice = slice(None)) -> Tensor:
        """x [T, *]: input of the first layer's attention -> what the norm after the last layer makes of the stream.

        Args:
            stream: residual stream [T, D], changed.
            batch: from `place`, planned for the layers' attention backend.
        """
        chosen: Sequence[Any] = self.layers[layers]
        attention = chosen[0].attention
        if isinstance(attention, MLAAttention):
            args: Any = attention.chunks(batch)
        else:
            args = group_inputs(batch, self._config.cache_groups, self._backends.attention)  # type: ignore[arg-type]
        for layer in chosen:
            x = layer.forward(x, stream, batch, args)
        return x


class _NoNorm:
    """Replaces the norm after a layer: returns the residual stream itself."""

    adds_rows = adds_pairs = False

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Tensor:
        return residual.add_(x)


def _join(
    attention: Any, post: RMSNorm, mlp: MLP, last: Any, parallel: ParallelContext, shared_out: bool
) -> DecoderLayer | ShardedLayer:
    if parallel.world_size == 1:
        return DecoderLayer(attention, post, mlp, last)
    return ShardedLayer(attention, post, mlp, last, choose_communication(parallel, mlp.tokens, shared_out))
