"""A weight and its linear kernel.

Legend: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_engine.kernels.linear.protocol import LinearKernel, PreparedLinear
from moe_engine.kernels.quantization.codes import CodedWeight, GroupCodes, PlainCodes, PlainWeight
from moe_engine.kernels.quantization.protocol import Activation, KernelFormat, ProductInput, RowsToNorm, as_format
from moe_engine.kernels.quantization.quantize import quantize_codes
from moe_engine.models.checkpoint.cut import UNCUT, Cut
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.share import WHOLE, Share


class Projection(NamedTuple):
    """A stored matrix: its name, its full shape, and the requested slice."""

    name: str
    shape: tuple[int, int]
    cut: Cut = UNCUT


class Linear:
    """x [T, K] -> x @ W.T (+ bias) [T, N].

    Args:
        weight: [N, K], a Tensor, or a `QuantizedWeight` of `format`.
        format: one that the kernel declares; None: a Tensor.
    """

    def __init__(
        self, kernel: LinearKernel, weight: Any, bias: Tensor | None = None, format: KernelFormat | None = None
    ) -> None:
        self._run: Callable[..., Tensor] = kernel.run
        self._norms = kernel.capabilities.norms
        prepare = kernel.prepare if format is None else kernel.capabilities.quantized[type(format)]
        self.weight = prepare(weight, bias)
        self.parts: tuple[Projection, ...] = ()
        """The stored matrices whose rows this weight stacks, with this rank's slices; (): not known, or rows of one
        matrix in several places."""
        self.input_format = kernel.input_format(self.weight)
        """Activation format of x."""
        self._into = kernel.capabilities.into if isinstance(self.weight.data, Tensor) else None

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes

    def adapt(self, add: Callable[[Tensor, Activation], None]) -> None:
        """From now on `add(y, x)` changes each result y [T, N] of x in place."""
        run = self._run

        def adapted(x: Activation, weight: Any) -> Tensor:
            y = run(x, weight)
            add(y, x)
            return y

        self._run, self._norms, self._into = adapted, None, None

    def norms(self, x: Tensor) -> bool:
        """Whether x [T, K] may be given as `RowsToNorm`. Not with adapters, which read the norm too."""
        return self._norms is not None and self._norms(x, self.weight)

    def __call__(self, x: ProductInput) -> Tensor:
        return self._run(x if isinstance(x, RowsToNorm) else as_format(x, self.input_format), self.weight)

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        """`self(x)` in `out` [T, N], contiguous; in its own dtype without a copy, if the kernel can."""
        if self._into is None or out.dtype != x.dtype:
            return out.copy_(self(x))
        return self._into(x, self.weight, out)

    def split(self, x: Activation) -> tuple[Tensor, Tensor | None]:
        """`self(x)` without a bias that takes a launch of its own, and that bias [N], for a reader that adds it."""
        weight = self.weight
        if not weight.adds_bias_apart:
            return self(x), None
        return self._run(as_format(x, self.input_format), replace(weight, bias=None)), weight.bias


def stacks(reader: WeightSource, rows: Mapping[str, int]) -> bool:
    """True if `load_linear` of matrices with this rank's rows of each, by name, keeps the form in which all of them are
    stored."""
    first, *others = (reader.format.kernel_format(name) for name in rows)
    counts = [*rows.values()][:-1]
    return all(other == first for other in others) and (
        first is None or all(count % first.row_block == 0 for count in counts)
    )


def load_linear(
    kernel: LinearKernel,
    reader: WeightSource,
    prefixes: Sequence[str],
    out_features: Sequence[int],
    in_features: int,
    bias: bool = False,
    out_shares: Sequence[Share] = (),
    in_share: Share = WHOLE,
) -> Linear:
    """Merges several projections of the same input into one product: rows stacked in the given order.

    Quantized weights stay as stored if the kernel declares their format and no scale's rows or columns are split, by
    sharding or by stacking; else they are dequantized.

    Args:
        out_features, in_features: of the unsharded projections.
        out_shares: this rank's part of each projection's rows (column parallel); default: all.
        in_share: this rank's part of the columns (row parallel): products are partial sums, and only the first rank has
            the bias.
    """
    shares = out_shares or [WHOLE] * len(prefixes)
    cuts = [Cut(s.cut(rows), in_share.cut(in_features)) for s, rows in zip(shares, out_features)]
    parts = [Projection(prefix, (rows, in_features), cut) for prefix, rows, cut in zip(prefixes, out_features, cuts)]
    return load_stacked(kernel, reader, parts, bias, in_share.is_first)


def load_stacked(
    kernel: LinearKernel, reader: WeightSource, parts: Sequence[Projection], bias: bool = False, adds_bias: bool = True
) -> Linear:
    """Rows of stored matrices in the given order as one product; all parts have the same columns. Several parts may be
    of one matrix. `adds_bias`: this rank has the biases, which are read; else they are skipped."""
    shapes = [part.cut.shape(part.shape) for part in parts]
    counts, has_bias = [rows for rows, _ in shapes], bias and adds_bias
    total, columns = sum(counts), shapes[0][1]
    able = kernel.capabilities
    format = format_for(able.quantized, reader, parts)
    if format is not None and (
        (able.takes is not None and not able.takes(format)) or any(count % format.row_block for count in counts[:-1])
    ):
        format = None
    weight = empty_weight(format, total, columns, reader)
    biases = torch.empty(total, dtype=reader.dtype, device=reader.device) if has_bias else None
    start = 0
    for part, count in zip(parts, counts):
        stop = start + count
        reader.linear(*part, out=weight[start:stop] if format is None else weight.rows(start, stop))
        if biases is not None:
            reader.tensor(part.name + ".bias", part.shape[:1], Cut(part.cut.rows), out=biases[start:stop])
        elif bias:
            reader.skip(part.name + ".bias")
        start = stop
    linear = Linear(kernel, weight, biases, format)
    if len({part.name for part in parts}) == len(parts):
        linear.parts = tuple(parts)
    return linear


def prepare_heads(kernel: LinearKernel, weight: Tensor, form: GroupCodes | None) -> PreparedLinear:
    """`kernel.prepare_heads` of weight [H, N, K], contiguous. With a form it becomes its quantized values, also for
    kernels without such heads."""
    heads, n, k = weight.shape
    if form is None or not form.takes(k):
        return kernel.prepare_heads(weight)
    rows, prepare = weight.view(heads * n, k), kernel.capabilities.coded_heads
    if prepare is not None:
        return prepare(PlainWeight(rows, form, kept=True), heads)
    rows.copy_(quantized_values(rows, form))
    return kernel.prepare_heads(weight)


def quantized_values(weight: Tensor, form: GroupCodes) -> Tensor:
    """float32 [N, K]: the values of weight [N, K] in a form."""
    n, k = weight.shape
    coded = CodedWeight.empty(form, n, k, weight.device)
    quantize_codes(weight, coded)
    return coded.dequantized()


def format_for(
    declared: Mapping[type[KernelFormat], Any], reader: WeightSource, parts: Sequence[Projection]
) -> KernelFormat | None:
    """The kernel format in which a kernel gets these matrices; None: as Tensors.

    Args:
        declared: the kernel's `capabilities.quantized`.
    """
    format, *others = (_taken(declared, reader.format.kernel_format(part.name)) for part in parts)
    if format is None or type(format) not in declared or any(other != format for other in others):
        return None
    return format if all(reader.keeps(*part) for part in parts) else None


def _taken(declared: Mapping[type[KernelFormat], Any], format: KernelFormat | None) -> KernelFormat | None:
    """The form, with codes for kernels that quantize no weights."""
    return format.codes if isinstance(format, PlainCodes) and PlainCodes not in declared else format


def empty_weight(format: KernelFormat | None, n: int, k: int, reader: WeightSource) -> Any:
    """Uninitialized memory [N, K] for `reader.linear`: a `QuantizedWeight` of `format`, or a Tensor."""
    if format is None:
        return torch.empty(n, k, dtype=reader.dtype, device=reader.device)
    return format.empty(n, k, reader.device)
