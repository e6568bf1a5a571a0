"""Reads a rank's weights by the names of the checkpoint, from the memory that the kernels multiply.

A kernel may have packed, merged or cut a tensor. The module that holds it is built again with numbered elements
(`models.partial_weights.code_source`), which shows the position of each element: no kernel needs an inverse of its
layout.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from moe_engine.errors import InputError, MoeEngineError
from moe_engine.models.partial_weights import CODES, FP8_CODES, code_source
from moe_engine.models.tensor_names import TensorNames
from moe_engine.models.tensors.model import added, factor
from moe_engine.models.weights import WeightSource
from moe_engine.worker.eplb.expert_control import ExpertControl
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.options import WorkerOptions
from moe_engine.worker.weight_parts import modules_of, pairs, parts_of, structure_of

MAX_ELEMENTS = 1 << 24


class ReadArgs(msgspec.Struct, forbid_unknown_fields=True):
    """`truncate_size`: the number of rows to return, at most."""

    name: str
    truncate_size: Annotated[int, msgspec.Meta(ge=1)]


class WeightRead:
    """Runs on the worker's thread, between steps.

    Attributes:
        refusal: the reason why weights cannot be read, or None.
    """

    def __init__(self, runner: ModelRunner, options: WorkerOptions, experts: ExpertControl) -> None:
        self.refusal: str | None = None
        self._runner, self._options, self._experts = runner, options, experts

    def read(self, args: ReadArgs) -> dict[str, Any]:
        """This rank's elements of a tensor's first rows.

        Returns:
            shape: of these rows. numbers (int64) and values (float32) as bytes: numbers of elements, row-major.

        Raises:
            MoeEngineError: unknown name, or a weight whose values a kernel has changed.
        """
        if self.refusal is not None:
            raise MoeEngineError(self.refusal)
        parts = parts_of(self._runner)
        try:
            name, shape = TensorNames(self._options.model, len(parts) > 1).resolve(args.name)
        except InputError as error:
            raise MoeEngineError(error.message) from None
        rows = min(shape[0], args.truncate_size)
        total = rows * prod(shape[1:])
        if total > MAX_ELEMENTS:
            raise MoeEngineError(f"truncate_size {rows}: {total} values; ask for at most {MAX_ELEMENTS} at once")
        if self._experts.balance is not None:
            self._experts.balance.settle()
        module = next(modules_of(parts, [name]), None)
        numbers, values = torch.empty(0, dtype=torch.int64), torch.empty(0)
        if module is not None:
            structure = structure_of(self._runner, self._options)
            base = FP8_CODES if structure.format.has_kernel_formats else CODES
            with torch.no_grad():
                numbers, values = _elements(module, structure, name, rows, total, base)
                values = values / factor(self._options.model, name) - added(self._options.model, name)
        return {"shape": [rows, *shape[1:]], "numbers": numbers.numpy().tobytes(), "values": values.numpy().tobytes()}


def _elements(
    module: Any, structure: WeightSource, name: str, rows: int, total: int, base: int
) -> tuple[Tensor, Tensor]:
    """Numbers and values of the elements of a tensor in a module."""
    places: list[Tensor] = []
    numbers: list[Tensor] = []
    values: list[Tensor] = []
    digit = 0
    while digit == 0 or base**digit < total:
        coded = module.build(code_source(structure, name, rows, digit, base))
        for i, (kept, code) in enumerate(pairs(module.module, coded)):
            flat = _elements_of(code, structure.dtype)
            if digit == 0:
                places.append(flat.nonzero().flatten())
                values.append(_elements_of(kept, structure.dtype)[places[i]].float())
                numbers.append(torch.zeros(len(places[i]), dtype=torch.int64))
            found = flat[places[i]].double()
            if not bool(((found >= 1) & (found <= base) & (found == found.round())).all()):
                raise MoeEngineError(f"{name}: a kernel keeps this weight in another form than the checkpoint's")
            numbers[i] += (found.to(torch.int64) - 1) * base**digit
        digit += 1
    return torch.cat(numbers), torch.cat(values)


def _elements_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements of a tensor on the host; packed weights are bytes of elements of the activation dtype."""
    flat = tensor.cpu().contiguous().view(-1)
    flat = flat.view(dtype) if flat.dtype == torch.uint8 else flat
    return flat.float() if flat.element_size() == 1 else flat
