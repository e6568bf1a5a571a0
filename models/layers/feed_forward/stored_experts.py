"""The experts of a layer in a checkpoint, loaded into the slots of a rank.

Legend: E routed experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from moe_engine.errors import ConfigError
from moe_engine.kernels.experts.batch import ExpertWeights
from moe_engine.kernels.experts.protocol import ExpertsKernel
from moe_engine.kernels.quantization.protocol import KernelFormat
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.checkpoint.load_threads import for_each
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.layers.feed_forward.expert_biases import empty_biases, fill_biases
from moe_engine.models.layers.linear import Projection, empty_weight, format_for
from moe_engine.models.tensors.model import ExpertNames
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import Share


def held_experts(moe: MoEConfig, layer_index: int, parallel: ParallelContext) -> list[int]:
    """The expert in each of this rank's slots."""
    if parallel.experts is not None:
        return parallel.experts.held(layer_index)
    count = Share.of(parallel.ep).width(moe.num_experts)
    return list(range(parallel.ep.rank * count, (parallel.ep.rank + 1) * count))


class StoredExperts:
    """The stored experts of a layer, and loading of a rank's `part` of them into its slots.

    Experts E and on are the shared ones, stored as one MLP `shared` of several times the width of an expert. Quantized
    experts stay as stored if the kernel declares their format and the part splits no scale's rows or columns; the part
    is of whole groups of columns if possible. Loading uses scratch memory for one expert per thread.
    """

    def __init__(
        self, kernel: ExpertsKernel, prefix: str, moe: MoEConfig, hidden: int, names: ExpertNames, part: Share,
        shared: str = "", group: int = 1, layer: int = 0,
    ) -> None:  # fmt: skip
        self.kernel = kernel
        self._prefix, self._names, self._shared, self._moe = prefix, names, shared, moe
        self._num_experts, self._hidden, self._whole, self._shared_width = (
            moe.num_experts, hidden, moe.width, moe.shared_width
        )  # fmt: skip
        self._activation = moe.activation(layer)
        self._cut = part.cut_in_groups(moe.width, group)
        self._width = moe.width if self._cut is None else self._cut.stop - self._cut.start
        if moe.squared and self._width % 2:
            raise ConfigError(
                f"{prefix}: a rank has {self._width} of {moe.width} channels of an expert without a gate; use a "
                "--tp-size and --ep-size that leave an even number"
            )

    def num_fusible(self, reader: WeightSource) -> int:
        """Shared experts that `load` takes as experts E and on; 0: their width or storage differs from the routed
        ones'."""
        count, rest = divmod(self._shared_width, self._whole)
        last = self._num_experts + count - 1
        return count if not rest and count and self._formats(reader, last) == self._formats(reader, 0) else 0

    def load(self, reader: WeightSource, held: Sequence[int]) -> ExpertWeights:
        """New weights with a slot for each of the experts `held`; each expert is read once for all its slots."""
        slots: dict[int, list[int]] = {}
        for slot, expert in enumerate(held):
            slots.setdefault(expert, []).append(slot)
        (format, down), sizes = self._formats(reader, held[0]), (len(held), self._hidden, self._width)
        if format is not None:
            kept = self.kernel.capabilities.quantized[type(format)]
            make = kept.allocate if down == format or kept.of_two is None else partial(kept.of_two, down)
            weights = make(*sizes, reader.device, format, **{"squared": True} if self._moe.squared else {})
        elif self._moe.squared:
            squared = self.kernel.capabilities.allocate_squared
            assert squared is not None
            weights = squared(*sizes, reader.dtype, reader.device)
        else:
            weights = self.kernel.allocate(*sizes, reader.dtype, reader.device)
        weights.activation = self._activation
        if self._moe.biased:
            weights.bias = empty_biases(self._moe, len(held), self._width, self._hidden, reader.device)
            weights.num_bytes += sum(part.nbytes for part in weights.bias.memory)
        self.fill(reader, weights, slots)
        for expert in sorted(set(range(self._num_experts)).difference(slots)):
            for projection in self._projections(expert):
                reader.skip_linear(projection.name, projection.shape)
        return weights

    def fill(self, reader: WeightSource, weights: ExpertWeights, slots: Mapping[int, Sequence[int]]) -> None:
        """Reads experts into their slots, by expert. Tensors without values (``moe-engine compile``): only one."""
        experts, kernel, wide = list(slots), self.kernel, (self._width, self._hidden)
        if reader.device == torch.device("meta"):
            del experts[1:]
        first = (wide[0] // 2, wide[1]) if self._moe.squared else wide
        format, down = self._formats(reader, experts[0])
        store = kernel.load_expert if format is None else kernel.capabilities.quantized[type(format)].load

        def scratch() -> list[Any]:
            return [*(empty_weight(format, *first, reader) for _ in range(2)), empty_weight(down, *wide[::-1], reader)]

        def load(index: int, parts: list[Any]) -> None:
            for projection, out in zip(self._projections(experts[index]), parts):
                reader.linear(*projection, out=out)
            for slot in slots[experts[index]]:
                store(weights, slot, *parts)

        for_each(len(experts), scratch, load)
        if weights.bias is not None:
            block = self._prefix.removesuffix(".experts")
            fill_biases(weights.bias, reader, block, self._moe, slots, self._cut)

    def _formats(self, reader: WeightSource, expert: int) -> tuple[KernelFormat | None, KernelFormat | None]:
        """The formats of gate and up, and of down; None: Tensors."""
        declared, (*up, down) = self.kernel.capabilities.quantized, self._projections(expert)
        first, last = format_for(declared, reader, up), format_for(declared, reader, [down])
        if first is None or last is None:
            return None, None
        kept = declared[type(first)]
        able = kept.takes is None or (kept.takes(first) and kept.takes(last))
        able &= kept.squared or not self._moe.squared
        return (first, last) if able and (first == last or kept.of_two is not None) else (None, None)

    def _projections(self, expert: int) -> list[Projection]:
        """Gate, up and down; without a gate the halves of up, and down."""
        if expert >= self._num_experts:
            return self._shared_projections(expert - self._num_experts)
        name, names, wide = f"{self._prefix}.{expert}", self._names, (self._whole, self._hidden)
        if self._moe.squared:
            begin, stop, _ = (self._cut or slice(None)).indices(self._whole)
            return _halves(f"{name}.{names.up}", f"{name}.{names.down}", wide, begin, stop)
        return [
            Projection(f"{name}.{names.gate}", wide, Cut(self._cut)),
            Projection(f"{name}.{names.up}", wide, Cut(self._cut)),
            Projection(f"{name}.{names.down}", wide[::-1], Cut(cols=self._cut)),
        ]

    def _shared_projections(self, index: int) -> list[Projection]:
        """Gate, up and down of one shared expert: its slice of the MLP that holds all of them."""
        wide, begin = (self._shared_width, self._hidden), index * self._whole
        start, stop, _ = (self._cut or slice(None)).indices(self._whole)
        cut = slice(begin + start, begin + stop)
        if self._moe.squared:
            return _halves(f"{self._shared}.up_proj", f"{self._shared}.down_proj", wide, cut.start, cut.stop)
        return [
            Projection(f"{self._shared}.gate_proj", wide, Cut(cut)),
            Projection(f"{self._shared}.up_proj", wide, Cut(cut)),
            Projection(f"{self._shared}.down_proj", wide[::-1], Cut(cols=cut)),
        ]


def _halves(up: str, down: str, shape: tuple[int, int], begin: int, stop: int) -> list[Projection]:
    """Channels [begin, stop) of an MLP without a gate, whose up has this shape: the halves of up, and down."""
    middle = (begin + stop) // 2
    return [
        Projection(up, shape, Cut(slice(begin, middle))),
        Projection(up, shape, Cut(slice(middle, stop))),
        Projection(down, shape[::-1], Cut(cols=slice(begin, stop))),
    ]
