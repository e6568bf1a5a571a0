"""Linear layers in C++: weights packed once into panels, read by one kernel for any number of rows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moe_engine.kernels.cpu import coded
from moe_engine.kernels.cpu.huge_pages import huge_bytes
from moe_engine.kernels.cpu.library import Library, load
from moe_engine.kernels.cpu.tensors import ANY_KIND, Panels, common_kind, kind_of, rows
from moe_engine.kernels.linear.protocol import LinearCapabilities, MLPCall, PreparedLinear
from moe_engine.kernels.quantization.codes import Coded, GroupCodes, PlainCodes
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat


class CpuLinear:
    name = "cpu"

    def __init__(self, library: Library | None = None, deterministic: bool = False) -> None:
        self._lib = library or load()
        self._deterministic = deterministic
        self.capabilities = LinearCapabilities(
            dict.fromkeys((GroupCodes, PlainCodes), self.prepare_coded), coded_heads=self.prepare_coded_heads
        )

    def _pack(self, weights: Tensor, bias: Tensor | None) -> PreparedLinear:
        heads, n, k = weights.shape
        kind = kind_of(weights.dtype)
        size = self._lib.moe_packed_bytes(kind, n, k)
        storage = huge_bytes(heads * size).view(heads, size)
        for head in range(heads):
            weight = rows(weights[head])
            self._lib.moe_pack(kind, weight.data_ptr(), weight.stride(0), n, k, storage.data_ptr() + head * size)
        padded, pointer, num_bytes = _pad(bias, n)
        data = Panels(kind, storage.data_ptr(), pointer, storage, padded, heads)
        return PreparedLinear(k, n, data, bias, storage.numel() + num_bytes)

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> PreparedLinear:
        return self._pack(weight.unsqueeze(0), bias)

    def prepare_coded(self, weight: Coded, bias: Tensor | None) -> PreparedLinear:
        """A weight of 4 or 8 bits, multiplied as stored. Raises ValueError: its columns do not form whole groups."""
        return self._pack_coded(weight, 1, bias)

    def prepare_coded_heads(self, weight: Coded, heads: int) -> PreparedLinear:
        return self._pack_coded(weight, heads, None)

    def _pack_coded(self, weight: Coded, heads: int, bias: Tensor | None) -> PreparedLinear:
        rows, k = weight.shape
        form, n = coded.form_of(weight.format, k, self._deterministic), rows // heads
        size = self._lib.moe_coded_bytes(form.address, n, k)
        storage = huge_bytes(heads * size).view(heads, size)
        for head in range(heads):
            part = weight.rows(head * n, (head + 1) * n)
            coded.pack(self._lib, part, storage.data_ptr() + head * size)
        padded, pointer, num_bytes = _pad(bias, n)
        data = Panels(ANY_KIND, storage.data_ptr(), pointer, storage, padded, heads, form.address)
        return PreparedLinear(k, n, data, bias, storage.numel() + num_bytes)

    def input_format(self, weight: PreparedLinear) -> ActivationFormat:
        return UNQUANTIZED

    def run(self, x: Tensor, weight: PreparedLinear) -> Tensor:
        data: Panels = weight.data
        x = rows(x)
        tokens, k = x.shape
        kind = kind_of(x.dtype)
        if data.kind not in (kind, ANY_KIND) or k != weight.in_features:
            raise _mismatch(x, weight)
        n = weight.out_features
        out = torch.empty((tokens, n), dtype=x.dtype)
        self._lib.moe_linear(
            kind, x.data_ptr(), x.stride(0), tokens, k, data.weight, n, data.bias, out.data_ptr(), n, data.form
        )
        return out

    def fuse_mlp(self, gate_up: PreparedLinear, down: PreparedLinear, limit: float = 0.0) -> MLPCall | None:
        if down.in_features % 16 or gate_up.bias is not None or down.bias is not None:
            return None
        return partial(self.run_mlp, gate_up=gate_up, down=down, limit=limit)

    def run_mlp(self, x: Tensor, gate_up: PreparedLinear, down: PreparedLinear, limit: float = 0.0) -> Tensor:
        """down(silu(gate(x)) * up(x)) [T, N] for weights without bias, gate_up [2I, D] (gate first), I % 16 == 0.
        limit: that of `fuse_mlp`."""
        first, second = gate_up.data, down.data
        x = rows(x)
        tokens, k = x.shape
        width, n = gate_up.out_features // 2, down.out_features
        kind = kind_of(x.dtype)
        if common_kind((kind, first.kind, second.kind)) != kind or k != gate_up.in_features:
            raise _mismatch(x, gate_up)
        if width % 16 or first.bias is not None or second.bias is not None or down.in_features != width:
            raise ValueError("run_mlp needs an MLP width that is a multiple of 16, and no biases")
        out = torch.empty((tokens, n), dtype=x.dtype)
        self._lib.moe_mlp(
            kind, x.data_ptr(), x.stride(0), tokens, k, width, first.weight, second.weight, n, out.data_ptr(), n,
            first.form, second.form, limit,
        )  # fmt: skip
        return out

    def prepare_heads(self, weight: Tensor) -> PreparedLinear:
        return self._pack(weight, None)

    def run_heads(self, x: Tensor, weight: PreparedLinear, out: Tensor | None = None) -> Tensor:
        data: Panels = weight.data
        x = rows(x)
        tokens, heads, k = x.shape
        n = weight.out_features
        kind = kind_of(x.dtype)
        if data.kind not in (kind, ANY_KIND) or k != weight.in_features or heads != data.heads:
            raise _mismatch(x, weight)
        if out is None:
            out = torch.empty((tokens, heads, n), dtype=x.dtype)
        elif out.dtype != x.dtype or out.shape != (tokens, heads, n) or out.stride(-1) != 1:
            return out.copy_(self.run_heads(x, weight))
        self._lib.moe_linear_heads(
            kind, x.data_ptr(), x.stride(0), x.stride(1), tokens, heads, k, data.weight, n, out.data_ptr(),
            out.stride(0), out.stride(1), data.form,
        )  # fmt: skip
        return out


def _pad(bias: Tensor | None, n: int) -> tuple[Tensor | None, int | None, int]:
    """The bias in float32 for whole panels, its address and its bytes."""
    if bias is None:
        return None, None, 0
    padded = torch.zeros((n + 15) // 16 * 16, dtype=torch.float32)
    padded[:n] = bias
    return padded, padded.data_ptr(), 4 * padded.numel()


def _mismatch(x: Tensor, weight: PreparedLinear) -> ValueError:
    kinds = {0: "float32", 1: "bfloat16", ANY_KIND: "coded"}
    return ValueError(
        f"rows {list(x.shape)} {x.dtype} do not fit a weight of {weight.data.heads} x "
        f"[{weight.out_features}, {weight.in_features}] {kinds[weight.data.kind]}"
    )
