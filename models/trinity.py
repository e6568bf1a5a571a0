"""Trinity: norms of results in front of the residual, a gate for each channel, layers without positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_engine.models.batch import ForwardBatch
from moe_engine.models.gated_heads import GatedHeadsModel
from moe_engine.models.layers.result_norm import ResultNorm, norm_names
from moe_engine.models.weights import WeightSource


class TrinityModel(GatedHeadsModel):
    """`Model` of the family. `batch.kv[layer]` is (keys, values)."""

    def make_norm(self, reader: WeightSource, prefix: str) -> Any:
        names = norm_names(prefix, self.config.num_layers)
        if not names[0]:
            return super().make_norm(reader, prefix)
        return ResultNorm(self.backends.ops, reader, names, self.config)

    def norm_prefixes(self, prefix: str) -> tuple[str, ...]:
        return tuple(f"{name}." for name in norm_names(prefix, self.config.num_layers) if name)

    def embed(self, batch: ForwardBatch) -> Tensor:
        embedded, scale = super().embed(batch), self.config.embed_scale
        return embedded if scale == 1.0 else embedded.mul_(scale)
