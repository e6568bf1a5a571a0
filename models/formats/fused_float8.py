"""FP8 experts in common tensors of a layer, with a scale per expert, as Mistral Small 4 is published, or one for all,
as ModelOpt writes Llama 4. Imports no torch.

Legend: E experts, D hidden, I expert width. `gate_up_proj` e4m3 [E, 2I, D] (rows of the gate first), `down_proj`
[E, D, I]; with each `_scale_inv` [E, 1, 1] or [E, 2, 1] (gate and up), a factor as in `Float8`, and
`_activation_scale` [E], which is not used. Of Llama 4 [E, D, 2I] and [E, I, D] with `_weight_scale` and `_input_scale`.
Sources: transformers, integrations/finegrained_fp8; vLLM, mllama4.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.formats.float8 import FP8Matrix
from moe_engine.models.formats.fused_experts import place_of
from moe_engine.models.formats.integers import SCALES, consume, read_scales
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import QuantizedWeight


@dataclass(frozen=True)
class FusedFloat8(FP8Matrix):
    """A `Scheme` of the experts' matrices; others have another scheme.

    Attributes:
        num_experts: E.
        transposed: the matrices are [K, N], with ModelOpt's names of scales.
    """

    num_experts: int
    transposed: bool = False

    extras: ClassVar[tuple[str, ...]] = (
        "_proj_scale_inv", "_proj_activation_scale", "_proj_weight_scale", "_proj_input_scale",
    )  # fmt: skip

    @property
    def _ends(self) -> tuple[str, str]:
        """Ends of the names of scales: of the weights, and of activations."""
        return ("_weight_scale", "_input_scale") if self.transposed else ("_scale_inv", "_activation_scale")

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        place = place_of(prefix)
        return place is not None and place.name + self._ends[0] in names

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        place = place_of(prefix)
        assert place is not None, prefix
        name, count, (weights, activations) = place.name, self.num_experts, self._ends
        halves = ((count, 2, 1),) if place.parts == 2 else ()
        matrix = (place.parts * shape[0], shape[1])
        found = [
            StoredTensor(name, (count, *(matrix[::-1] if self.transposed else matrix)), ("F8_E4M3",)),
            StoredTensor(name + weights, (count, 1, 1), SCALES, (*halves, (count,), (), (1,))),
        ]
        if name + activations in names:
            found.append(StoredTensor(name + activations, (count,), SCALES, ((count, 1, 1), (), (1,))))
        return tuple(found)

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        from moe_engine.kernels.quantization.protocol import BlockWeight

        place = place_of(prefix)
        assert place is not None, prefix
        weight, scale, *unused = self.tensors(prefix, shape, source.names)
        consume(source, *unused)
        expert = Cut(slice(place.expert, place.expert + 1))
        own = read_scales(source, scale).float()
        own = own[place.expert].reshape(-1) if own.numel() > 1 else own.reshape(-1)
        factor = float(own[place.part if len(own) > 1 else 0])
        with source.open(weight, expert) as part:
            rows = (part[0].T if self.transposed else part[0])[place.part * shape[0] : (place.part + 1) * shape[0]]
            if isinstance(out, BlockWeight):
                out.data.copy_(cut.of(rows))
                out.scales.fill_(factor)
                return
            out.copy_(cut.of(rows).float().mul_(factor))  # type: ignore[union-attr]  # a Tensor
