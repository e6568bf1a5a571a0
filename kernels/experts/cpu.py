"""Routed experts in C++: sort, two grouped products and the weighted sum in one call."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.cpu import coded
from moe_engine.kernels.cpu.huge_pages import huge_bytes
from moe_engine.kernels.cpu.library import Library, load
from moe_engine.kernels.cpu.tensors import ANY_KIND, ExpertPanels, kind_of, rows
from moe_engine.kernels.decoder.layers import fuse_moe
from moe_engine.kernels.experts.batch import ExpertBatch, ExpertWeights
from moe_engine.kernels.experts.protocol import ExpertsCapabilities, QuantizedExperts
from moe_engine.kernels.gate_form import SILU, SQUARED
from moe_engine.kernels.quantization.codes import Coded, GroupCodes, PlainCodes
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat


class _Biases(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate_up", "down")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "beta")),
        ("squared", ctypes.c_int32),
    ]


def biases_struct(weights: ExpertWeights) -> _Biases | None:
    """The C struct of biases, which must live as long as it, or of their activation alone; None: neither."""
    if (bias := weights.bias) is not None:
        return _Biases(bias.gate_up.data_ptr(), bias.down.data_ptr(), bias.alpha, bias.limit, 0.0, 0)
    form = weights.activation
    return None if form.is_silu else _Biases(None, None, form.alpha, form.limit, form.beta, form.squared)


class CpuExperts:
    name = "cpu"

    def __init__(self, library: Library | None = None, deterministic: bool = False) -> None:
        self._lib = library or load()
        self._deterministic = deterministic

    @property
    def capabilities(self) -> ExpertsCapabilities:
        coded = QuantizedExperts(self.allocate_coded, self.load_coded, self.allocate_two, squared=True)
        return ExpertsCapabilities(
            {GroupCodes: coded, PlainCodes: coded}, fuse_layer=partial(fuse_moe, self._lib), biases=True, clamps=True,
            allocate_squared=partial(self.allocate, squared=True),
        )  # fmt: skip

    def allocate(
        self, num_experts: int, hidden: int, width: int, dtype: Any, device: Any, squared: bool = False
    ) -> ExpertWeights:
        kind = kind_of(dtype)
        size = self._lib.moe_expert_bytes(kind, hidden, width, None, None, squared)
        storage = huge_bytes(num_experts * size).view(num_experts, size)
        gate = self._lib.moe_packed_bytes(kind, width // 2 if squared else width, hidden)
        data = ExpertPanels(kind, storage.data_ptr(), storage, 2 * gate, gate)
        form = SQUARED if squared else SILU
        return ExpertWeights(num_experts, hidden, width, data, storage.numel(), activation=form)

    def allocate_coded(
        self, num_experts: int, hidden: int, width: int, device: Any, format: GroupCodes, squared: bool = False
    ) -> ExpertWeights:
        """Reserves experts of 4 or 8 bits, multiplied as stored."""
        return self.allocate_two(format, num_experts, hidden, width, device, format, squared)

    def allocate_two(
        self, down: GroupCodes, num_experts: int, hidden: int, width: int, device: Any, format: GroupCodes,
        squared: bool = False,
    ) -> ExpertWeights:  # fmt: skip
        """The same with another form of down."""
        up_form, down_form = (
            coded.form_of(one, k, self._deterministic).address for one, k in ((format, hidden), (down, width))
        )
        gate = self._lib.moe_coded_bytes(up_form, width // 2 if squared else width, hidden)
        size = self._lib.moe_expert_bytes(0, hidden, width, up_form, down_form, squared)
        storage = huge_bytes(num_experts * size).view(num_experts, size)
        data = ExpertPanels(ANY_KIND, storage.data_ptr(), storage, 2 * gate, gate, up_form, down_form)
        form = SQUARED if squared else SILU
        return ExpertWeights(num_experts, hidden, width, data, storage.numel(), activation=form)

    def load_coded(self, weights: ExpertWeights, expert: int, gate: Coded, up: Coded, down: Coded) -> None:
        """Stores one expert: gate, up [I, D] (without a gate the halves of up), down [D, I]."""
        data: ExpertPanels = weights.data
        hidden, width = weights.hidden, weights.width
        if not 0 <= expert < weights.num_experts:
            raise IndexError(f"expert {expert} of {weights.num_experts}")
        start = data.address + expert * data.storage.shape[1]
        first = (width // 2 if weights.activation.squared else width, hidden)
        parts = (
            (gate, first, data.form, 0),
            (up, first, data.form, data.up_offset),
            (down, (hidden, width), data.down_form, data.down_offset),
        )
        for weight, shape, form, offset in parts:
            if weight.shape != shape or coded.form_of(weight.format, shape[1], self._deterministic).address != form:
                raise ValueError(f"expert {expert}: {list(weight.shape)} {weight.format}, expected {list(shape)}")
            coded.pack(self._lib, weight, start + offset)

    def load_expert(self, weights: ExpertWeights, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        data: ExpertPanels = weights.data
        hidden, width = weights.hidden, weights.width
        if not 0 <= expert < weights.num_experts:
            raise IndexError(f"expert {expert} of {weights.num_experts}")
        start = data.address + expert * data.storage.shape[1]
        first, last = (width // 2 if weights.activation.squared else width, hidden), (hidden, width)
        parts = ((gate, first, 0), (up, first, data.up_offset), (down, last, data.down_offset))
        for weight, shape, offset in parts:
            if weight.shape != shape or kind_of(weight.dtype) != data.kind:
                raise ValueError(f"expert {expert}: {list(weight.shape)} {weight.dtype}, expected {list(shape)}")
            weight = rows(weight)
            self._lib.moe_pack(data.kind, weight.data_ptr(), weight.stride(0), *shape, start + offset)

    def _check(self, x: Tensor, weights: ExpertWeights) -> ExpertPanels:
        data: ExpertPanels = weights.data
        if data.kind not in (kind_of(x.dtype), ANY_KIND) or x.shape[-1] != weights.hidden:
            raise ValueError(f"rows {list(x.shape)} {x.dtype} do not fit experts of hidden size {weights.hidden}")
        return data

    def run(self, batch: ExpertBatch, weights: ExpertWeights) -> Tensor:
        x = batch.x.contiguous()
        data = self._check(x, weights)
        out = torch.empty_like(x)
        if batch.layout == "grouped":
            assert batch.offsets is not None
            sizes = batch.offsets.to(torch.int32).contiguous()
            offsets, counts, capacity = sizes.data_ptr(), None, 0
        elif batch.layout == "padded":
            assert batch.counts is not None
            sizes = batch.counts.to(torch.int32).contiguous()
            offsets, counts, capacity = None, sizes.data_ptr(), x.shape[1]
        else:
            raise ValueError(f"unknown layout {batch.layout!r}")
        biases = biases_struct(weights)
        self._lib.moe_experts(
            kind_of(x.dtype), x.data_ptr(), offsets, counts, capacity, weights.num_experts, weights.hidden,
            weights.width, data.address, out.data_ptr(), data.form, data.down_form,
            None if biases is None else ctypes.addressof(biases), weights.activation.limit,
        )  # fmt: skip
        return out

    def run_routed(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, weights: ExpertWeights, add: Tensor | None = None
    ) -> Tensor:
        """See the protocol. With `add` [T, D] (for example the shared expert's output) the result is the sum of both.

        Ids outside [0, E) contribute nothing.
        """
        x = rows(x)
        data = self._check(x, weights)
        tokens, top_k = topk_ids.shape
        if topk_ids.dtype != torch.int32 or not topk_ids.is_contiguous():
            topk_ids = topk_ids.to(torch.int32).contiguous()
        if topk_weights.dtype != torch.float32 or not topk_weights.is_contiguous():
            topk_weights = topk_weights.float().contiguous()
        if add is not None and (add.dtype != x.dtype or add.shape != x.shape or add.stride(-1) != 1):
            add = add.to(x.dtype).expand(x.shape).contiguous()
        out = torch.empty((tokens, weights.hidden), dtype=x.dtype)
        biases = biases_struct(weights)
        self._lib.moe_routed(
            kind_of(x.dtype), x.data_ptr(), x.stride(0), tokens, top_k, topk_weights.data_ptr(), topk_ids.data_ptr(),
            weights.num_experts, weights.hidden, weights.width, data.address,
            None if add is None else add.data_ptr(), 0 if add is None else add.stride(0), out.data_ptr(), data.form,
            data.down_form, None if biases is None else ctypes.addressof(biases), weights.activation.limit,
        )  # fmt: skip
        return out

    def expert_memory(self, weights: ExpertWeights, expert: int) -> list[Tensor]:
        return [weights.data.storage[expert]]

    def input_format(self, weights: ExpertWeights) -> ActivationFormat:
        return UNQUANTIZED
