"""LongCat-Flash: MLA with scaled latents; experts on a shortcut past a pair of dense layers; zero experts.

Each published layer is two layers here, see `longcat_names`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from moe_engine.models.families.deepseek import DeepseekModel
from moe_engine.models.layers.decoder import Reloadable
from moe_engine.models.layers.decoder_layer import FeedForward
from moe_engine.models.layers.feed_forward.mlp import MLP
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.models.layers.shortcut import Shortcut, ShortcutEnd, ShortcutStart
from moe_engine.models.tensors.model import expert_names
from moe_engine.models.weights import WeightSource


class LongcatFlashModel(DeepseekModel):
    """`Model` of the family. ``batch.kv[layer]`` is the latent cache [num_slots, C+R]; the MTP layer is dense."""

    _shortcut: Shortcut
    """Shortcut of the pair of layers that is being built."""

    def make_feed_forward(self, layer_index: int, reader: WeightSource) -> FeedForward:
        mlp = self._make_mlp(layer_index, reader)
        if layer_index >= self.config.num_layers:
            return mlp
        if not self.config.moe_layers[layer_index]:
            first = self.layers[layer_index - 1].feed_forward
            assert isinstance(first, ShortcutStart)
            return ShortcutEnd(mlp, first.moe.tokens, self._shortcut)
        self._shortcut = Shortcut()
        return ShortcutStart(mlp, self._make_moe(layer_index, reader), self._shortcut)

    def _make_mlp(self, layer_index: int, reader: WeightSource) -> MLP:
        widths = self.config.hidden_size, self.config.intermediate_size
        return MLP.dense(self.backends, reader, self.parallel, f"model.layers.{layer_index}.mlp", *widths)

    def _make_moe(self, layer_index: int, reader: WeightSource) -> MoE:
        return MoE(self.config, layer_index, self.backends, reader, self.parallel)

    @property
    def moes(self) -> list[MoE]:
        halves = (layer.feed_forward for layer in self.layers)
        return [half.moe for half in halves if isinstance(half, ShortcutStart)]

    def layer_modules(self, layer_index: int, layer: Any, next_norm: str) -> Iterator[Reloadable]:
        half = layer.feed_forward
        for module in super().layer_modules(layer_index, layer, next_norm):
            if module.module is not half:
                yield module
                continue
            name = f"model.layers.{layer_index}"
            mlp = half if isinstance(half, MLP) else half.mlp
            yield Reloadable((f"{name}.mlp.",), mlp, partial(self._make_mlp, layer_index))
            if isinstance(half, ShortcutStart):
                prefix = f"{name}.{expert_names(self.config).block}."
                yield Reloadable((prefix,), half.moe, partial(self._make_moe, layer_index))
