"""Models for images and text: a text model with a vision tower (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3-VL-MoE; Kimi
K2.5 in `models.kimi`).

Legend: T tokens in the step, n image tokens of them, D hidden, R rotary width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import ModelConfig
from moe_engine.models.dense import DenseModel
from moe_engine.models.layers.compiled_layer import CompiledLayer
from moe_engine.models.layers.decoder import Decoder, Reloadable
from moe_engine.models.layers.deepstack import DeepstackRows
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.vision.grid import Grid
from moe_engine.models.vision_config import VisionConfig
from moe_engine.models.vision_tensors import PREFIX
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext


class Tower(Protocol):
    """A vision tower, made with (`VisionConfig`, `WeightSource`, `Backends`); `VisionConfig.tower` names its class."""

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, patch width] in the activation dtype -> rows of the tokens [N, `VisionConfig.row_width`]."""


class ImageInputs(Decoder):
    """Added before a text model's class: the input may have image tokens (`ForwardBatch.images`), whose embeddings are
    rows of the tower.

    Positions of image tokens have several axes. The rotary table has rows for them after those of positions; a step
    writes the rows of its image tokens, so that kernels read one table.

    Args:
        max_image_tokens: most image tokens of a step.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightSource,
        backends: Backends,
        parallel: ParallelContext,
        max_positions: int | None = None,
        max_image_tokens: int = 0,
    ) -> None:
        self.vision = config.vision
        self.tower: Tower | None = None if config.vision is None else make_tower(config.vision, reader, backends)
        self._first_row = max_positions or config.context_length
        more = max_image_tokens if config.rope.axes else 0
        super().__init__(config, reader, backends, parallel, self._first_row + more)
        axes = torch.tensor(config.rope.axes * 2, device=reader.device)  # of cosines, then of sines
        self._axis_of = axes if config.rope.axes else None  # [R]

    def make_layer(self, layer_index: int, reader: WeightSource, next_norm: RMSNorm, shared_out: bool = False) -> Any:
        layer = super().make_layer(layer_index, reader, next_norm, shared_out)
        if self.vision is not None and layer_index < len(self.vision.deepstack_layers):
            whole = layer.whole if isinstance(layer, CompiledLayer) else layer
            whole.deepstack = DeepstackRows(layer_index + 1, self.config.hidden_size)
        return layer

    def encode(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Rows of the tokens of one image [N, `VisionConfig.row_width`]. pixels: [P, patch width], any float dtype."""
        assert self.tower is not None
        return self.tower.forward(pixels.to(self.embedding.weight.dtype), grid)

    def attention_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        if batch.images is not None and self._axis_of is not None:
            batch = self._with_rows(batch, self._axis_of)
        return super().attention_args(batch)

    def embed(self, batch: ForwardBatch) -> Tensor:
        residual = super().embed(batch)
        if batch.images is not None:
            residual.index_copy_(0, batch.images.tokens, batch.images.rows[:, : residual.shape[1]])
        return residual

    def modules(self) -> Iterator[Reloadable]:
        vision = self.vision
        if vision is not None:
            yield Reloadable((PREFIX,), self.tower, lambda reader: make_tower(vision, reader, self.backends))
        yield from super().modules()

    def _with_rows(self, batch: ForwardBatch, axis_of: Tensor) -> ForwardBatch:
        """Writes the rotary rows of the step's image tokens, and points their positions at them."""
        images = batch.images
        assert images is not None
        table: RotaryTable = self.rotary
        count, first = len(images.tokens), self._first_row + images.before
        last = first + count
        if last > len(table.cos_sin):
            total, room = images.before + count, len(table.cos_sin) - self._first_row
            raise ValueError(f"{total} image tokens in a step, room for {room}")
        columns = torch.arange(len(axis_of), device=axis_of.device)
        table.cos_sin[first:last] = table.cos_sin[images.axes[axis_of].T, columns]  # [n, R]
        places = torch.arange(first, last, device=axis_of.device)
        return replace(batch, positions=batch.positions.index_copy(0, images.tokens, places))


class ImageTextModel(ImageInputs, DenseModel):
    """`Model` for images and text on the GQA families."""

    has_mtp = False


def make_tower(vision: VisionConfig, reader: WeightSource, backends: Backends) -> Tower:
    """The tower of a config."""
    module, _, name = vision.tower.partition(":")
    tower: Tower = getattr(import_module(module), name)(vision, reader, backends)
    return tower
