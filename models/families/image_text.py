"""Models for images and text: a text model with a vision tower (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3-VL-MoE,
GLM-4.1V, GLM-4.5V, GLM-4.6V, Command A Vision; Gemma 3 in `models.families.gemma3`, Kimi K2.5 in
`models.families.kimi`, Mistral's in `models.families.mistral3`).

Legend: T tokens in the step, n image tokens of them, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.families.dense import DenseModel
from moe_engine.models.layers.attention.axis_rows import AxisRows
from moe_engine.models.layers.compiled_layer import CompiledLayer
from moe_engine.models.layers.decoder import Decoder, Reloadable
from moe_engine.models.layers.embedding import EMBEDDING
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.residual.deepstack import DeepstackRows
from moe_engine.models.tensors.vision import PREFIX
from moe_engine.models.vision.grid import Grid
from moe_engine.models.vision.row_ends import RowEnds
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext


class Tower(Protocol):
    """A vision tower, made with (`VisionConfig`, `WeightSource`, `Backends`); `VisionConfig.tower` names its class."""

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, patch width] in the activation dtype -> rows of the tokens [N, `VisionConfig.row_width`]."""


class ImageInputs(Decoder):
    """Added before a text model's class: the input may have image tokens (`ForwardBatch.images`), whose embeddings are
    rows of the tower. After the class of a model with residual streams, which spreads the embeddings.

    If positions of image tokens have several axes, the rotary table has rows for them after those of positions.

    Args:
        max_image_tokens: most image tokens of a step.
        options: of the text model.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightSource,
        backends: Backends,
        parallel: ParallelContext,
        max_positions: int | None = None,
        max_image_tokens: int = 0,
        **options: Any,
    ) -> None:
        self.vision = config.vision
        self.tower: Tower | None = None if config.vision is None else make_tower(config.vision, reader, backends)
        first, axes = max_positions or config.context_length, config.rope.axes
        self.max_image_tokens = max_image_tokens
        has_text = config.vision is not None and (config.vision.row_ends or config.vision.tile_marks)
        self.row_ends = RowEnds(config, reader) if has_text else None
        super().__init__(config, reader, backends, parallel, first + (max_image_tokens if axes else 0), **options)
        self._axis_rows = AxisRows(self.rotary, first, axes) if axes else None

    def make_layer(self, layer_index: int, reader: WeightSource, next_norm: RMSNorm, shared_out: bool = False) -> Any:
        layer = super().make_layer(layer_index, reader, next_norm, shared_out)
        if self.vision is not None and layer_index < len(self.vision.deepstack_layers):
            whole = layer.whole if isinstance(layer, CompiledLayer) else layer
            whole.deepstack = DeepstackRows(layer_index + 1, self.config.hidden_size)
        return layer

    def encode(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Rows of the tokens of one image [N, `VisionConfig.row_width`]. pixels: [P, patch width], any float dtype."""
        assert self.tower is not None
        rows = self.tower.forward(pixels.to(self.embedding.weight.dtype), grid)
        return rows if self.row_ends is None else self.row_ends.insert(rows, grid)

    def place(self, batch: ForwardBatch) -> ForwardBatch:
        return batch if self._axis_rows is None else self._axis_rows.place(batch)

    def embed(self, batch: ForwardBatch) -> Tensor:
        residual = super().embed(batch)
        if batch.images is not None:
            embedded = residual[:, : self.config.hidden_size]
            embedded.index_copy_(0, batch.images.tokens, batch.images.rows[:, : embedded.shape[1]])
        return residual

    def modules(self) -> Iterator[Reloadable]:
        vision = self.vision
        if vision is not None:
            yield Reloadable((PREFIX,), self.tower, lambda reader: make_tower(vision, reader, self.backends))
        yield from super().modules()  # the embedding comes before its copies: it is read from the first module
        if self.row_ends is not None:
            yield Reloadable((EMBEDDING,), self.row_ends, partial(RowEnds, self.config))


class ImageTextModel(ImageInputs, DenseModel):
    """`Model` for images and text on the GQA families."""

    has_mtp = False


def make_tower(vision: VisionConfig, reader: WeightSource, backends: Backends) -> Tower:
    """The tower of a config."""
    module, _, name = vision.tower.partition(":")
    tower: Tower = getattr(import_module(module), name)(vision, reader, backends)
    return tower
