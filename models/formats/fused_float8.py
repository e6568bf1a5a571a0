"""FP8 experts in common tensors of a layer, with a scale per expert, as Mistral Small 4 is published. Imports no torch.

Legend: E experts, D hidden, I expert width. `gate_up_proj` e4m3 [E, 2I, D] (rows of the gate first), `down_proj`
[E, D, I]; beside each `_scale_inv` [E, 1, 1] or [E, 2, 1] (gate and up), a factor as in `Float8`, and
`_activation_scale` [E], which is not used. Source: transformers, integrations/finegrained_fp8.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moe_engine.models.cut import Cut
from moe_engine.models.formats.float8 import FP8Matrix
from moe_engine.models.formats.fused_experts import place_of
from moe_engine.models.formats.integers import SCALES, consume
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import QuantizedWeight


@dataclass(frozen=True)
class FusedFloat8(FP8Matrix):
    """A `Scheme` of the experts' matrices; others have another scheme.

    Attributes:
        num_experts: E.
    """

    num_experts: int

    extras: ClassVar[tuple[str, ...]] = ("_proj_scale_inv", "_proj_activation_scale")

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        place = place_of(prefix)
        return place is not None and f"{place.name}_scale_inv" in names

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        place = place_of(prefix)
        assert place is not None, prefix
        name, count = place.name, self.num_experts
        halves = ((count, 2, 1),) if place.parts == 2 else ()
        found = [
            StoredTensor(name, (count, place.parts * shape[0], shape[1]), ("F8_E4M3",)),
            StoredTensor(f"{name}_scale_inv", (count, 1, 1), SCALES, (*halves, (count,))),
        ]
        if f"{name}_activation_scale" in names:
            found.append(StoredTensor(f"{name}_activation_scale", (count,), SCALES, ((count, 1, 1),)))
        return tuple(found)

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        from moe_engine.kernels.quantization.protocol import BlockWeight

        place = place_of(prefix)
        assert place is not None, prefix
        weight, scale, *unused = self.tensors(prefix, shape, source.names)
        consume(source, *unused)
        expert = Cut(slice(place.expert, place.expert + 1))
        with source.open(scale, expert) as scales:
            own = scales.float().reshape(-1)
            factor = float(own[place.part if len(own) > 1 else 0])
        with source.open(weight, expert) as part:
            rows = part[0][place.part * shape[0] : (place.part + 1) * shape[0]]
            if isinstance(out, BlockWeight):
                out.data.copy_(cut.of(rows))
                out.scales.fill_(factor)
                return
            out.copy_(cut.of(rows).float().mul_(factor))  # type: ignore[union-attr]  # a Tensor
