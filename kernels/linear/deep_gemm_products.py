"""DeepGEMM's products for the linear and expert kernels: operands, scale layouts, groups.

Hopper reads float32 scales; Blackwell reads exponents (UE8M0), four per int32, of powers of two: weights with other
scales are requantized at load. Source: csrc/apis/{gemm,layout}.hpp, csrc/utils/layout.hpp.
Legend: M rows, N out-features, K in-features, G groups (experts).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_engine.kernels.permutation.protocol import ExpertOrder, Permutation, most_rows
from moe_engine.kernels.permutation.reference import TorchPermutation
from moe_engine.kernels.quantization import groups as group_reference
from moe_engine.kernels.quantization import reference
from moe_engine.kernels.quantization.groups import RowGroups
from moe_engine.kernels.quantization.protocol import (
    BLOCK,
    Activation,
    ActivationFormat,
    BlockWeight,
    QuantizedActivation,
    QuantizedRows,
)
from moe_engine.kernels.vendors.probe import DEEP_GEMM, accepts

RECIPE = (1, BLOCK, BLOCK)
"""Scale blocks: 1 x 128 for activations, 128 x 128 for weights."""

N_MULTIPLE = 64
SMALL_ROWS = 64
"""Rows of the smaller tile of Hopper's grouped products, and the alignment of groups that are mostly within one."""
MARGIN = 1.2
"""Rows of a group for which a tile is chosen, per expected row (tests/test_fp8_fp4.py of the library)."""

Operand = tuple[Tensor, Tensor]
"""e4m3 data and their scales in the library's layout."""


class Quantization(Protocol):
    """FP8 quantization of activations: `kernels.quantization.reference`, or the Triton kernels of the same names."""

    def quantize_rows(self, x: Tensor, power_of_two: bool = False, exponents: bool = False) -> QuantizedRows: ...

    def silu_mul_quantize(
        self, gate_up: Tensor, power_of_two: bool = False, exponents: bool = False, limit: float = 0.0
    ) -> QuantizedRows: ...


class GroupQuantization(Protocol):
    """The same for the valid rows of groups: `kernels.quantization.groups`, or the Triton kernels of the same names."""

    def quantize_groups(
        self, x: Tensor, groups: RowGroups, power_of_two: bool = False, exponents: bool = False
    ) -> QuantizedRows: ...

    def silu_mul_quantize_groups(
        self, gate_up: Tensor, groups: RowGroups, power_of_two: bool = False, exponents: bool = False,
        limit: float = 0.0, weights: Tensor | None = None,
    ) -> QuantizedRows: ...  # fmt: skip

    def silu_mul_groups(
        self, gate_up: Tensor, groups: RowGroups, limit: float = 0.0, weights: Tensor | None = None
    ) -> Tensor: ...

    def pack_scales(self, scales: Tensor, groups: RowGroups) -> Tensor: ...


@dataclass(frozen=True)
class Groups:
    """Positions of the rows of G groups when each group starts at a multiple of the library's alignment."""

    place: Tensor  # int32 [M]: aligned position of each row
    num_rows: int  # aligned rows, the worst case: known without a device read
    layout: Tensor  # int32: [G] ends of the groups' rows, or [num_rows] the group of each row, -1 in padding
    ends: bool  # True: `layout` holds ends


class DeepGemm:
    """The library, with its formats on this GPU.

    Args:
        module: the library; default: the installed one.
        capability: compute capability; default: of the current GPU.
        quantization: quantization kernels, and with them the permutation kernels; default: Triton if
            installed, else torch.

    Raises:
        ImportError: the library is missing, lacks a required function, or takes no group ends on Blackwell.
    """

    def __init__(
        self,
        module: Any | None = None,
        capability: tuple[int, int] | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        self._lib = DEEP_GEMM.load() if module is None else DEEP_GEMM.check(module)
        self.exponents = (capability or _capability())[0] >= 10
        """True if scales are powers of two, packed."""
        self._quantization: Quantization = quantization or _quantization()
        self._groups = _groups(self._quantization)
        self.permutation: Permutation = _permutation(self._quantization)
        self.heads_quantized = _heads_quantized(self._quantization)
        """(x [T, H, K], weight [H, N, K], power_of_two, exponents=) -> the product per head, quantized; None with torch
        kernels."""
        self._ends: bool | None = None
        if not accepts(self._lib.m_grouped_fp8_gemm_nt_contiguous, "use_psum_layout"):
            if self.exponents:  # packing would trap at scales of rows between groups, which are uninitialized
                raise ImportError(f"{self._lib.__name__} takes no group ends: too old ({DEEP_GEMM.install})")
            self._ends = False
        self._aligns = not self.exponents and hasattr(self._lib, "set_mk_alignment_for_contiguous_layout")
        if hasattr(self._lib, "set_pdl"):
            # programmatic dependent launch: a kernel starts before the one ahead ends, and waits (griddepcontrol)
            # before its first read of global memory, whatever ran ahead
            self._lib.set_pdl(True)

    @property
    def shares_with_triton(self) -> bool:
        """True if Triton runs here and its kernels read weights in the library's layout: scales are not packed."""
        return not self.exponents and self._quantization is not reference

    def _needs_ends(self, device: torch.device) -> bool:
        """Whether grouped products take group ends; known after the first one, in the warm-up."""
        if self._ends is None:
            self._ends = self.exponents or _runs_with_ends(self._lib, device)
        return self._ends

    @staticmethod
    def serves(n: int, k: int) -> bool:
        """True if a weight [N, K] can stay in FP8: whole blocks of channels, and a multiple of the tile's rows."""
        return k % BLOCK == 0 and n % N_MULTIPLE == 0

    def packed_columns(self, k: int) -> int:
        """Columns of a weight's scales on Blackwell, four exponents each."""
        return -(-k // (4 * BLOCK))

    def weight(self, weight: BlockWeight) -> Operand:
        """A weight [N, K] in the library's layout, so that no call transposes scales."""
        if not self.exponents:
            return weight.data.contiguous(), weight.scales.contiguous()
        if not weight.power_of_two:
            weight = reference.quantize_weight(reference.dequantize_weight(weight), power_of_two=True)
        n, k = weight.data.shape
        scales = self._lib.transform_sf_into_required_layout(
            weight.scales.contiguous(), n, k, RECIPE, None, is_sfa=False
        )
        return weight.data.contiguous(), scales

    def input_format(self, power_of_two: bool) -> ActivationFormat:
        """Activation format of products with a weight."""
        return ActivationFormat.fp8(power_of_two or self.exponents, self.exponents)

    def expert_format(self, power_of_two: bool) -> ActivationFormat:
        """The same of grouped products, whose rows are permuted or sent with float32 scales."""
        return ActivationFormat.fp8(power_of_two or self.exponents)

    def quantized(self, x: Activation, power_of_two: bool) -> QuantizedRows:
        """x [M, K] bf16, quantized if it is not yet."""
        if isinstance(x, QuantizedActivation):
            return x.rows
        return self._quantization.quantize_rows(x, power_of_two or self.exponents)

    def rows(self, x: Activation, power_of_two: bool) -> Operand:
        """`quantized` as an operand."""
        return self.operand(self.quantized(x, power_of_two))

    def silu_mul(self, gate_up: Tensor, power_of_two: bool, limit: float = 0.0) -> Operand:
        """gate_up [M, 2I], gate first -> silu(gate) * up, quantized. limit: as in `Ops.silu_and_mul`."""
        exact = power_of_two or self.exponents
        return self.operand(self._quantization.silu_mul_quantize(gate_up, exact, limit=limit))

    def dense_rows(self, x: Activation, power_of_two: bool) -> Operand:
        """`rows` of a dense product, with scales that no call packs."""
        if isinstance(x, QuantizedActivation):
            return self.operand(x.rows)
        rows = self._quantization.quantize_rows(x, power_of_two or self.exponents, self.exponents)
        return rows.data, rows.scales

    def dense_silu_mul(self, gate_up: Tensor, power_of_two: bool, limit: float = 0.0) -> Operand:
        """`silu_mul` of a dense product."""
        rows = self._quantization.silu_mul_quantize(gate_up, power_of_two or self.exponents, self.exponents, limit)
        return rows.data, rows.scales

    def group_rows(self, x: Tensor, groups: RowGroups, power_of_two: bool) -> Operand:
        """The valid rows of x [G, C, K] or [M, K], quantized."""
        rows = self._groups.quantize_groups(x, groups, power_of_two or self.exponents, self.exponents)
        return rows.data, rows.scales

    def silu_mul_groups(
        self, gate_up: Tensor, groups: RowGroups, fp8: bool, power_of_two: bool, limit: float = 0.0,
        weights: Tensor | None = None,
    ) -> Operand | Tensor:  # fmt: skip
        """silu(gate) * up of the valid rows of gate_up [G, C, 2I] or [M, 2I], gate first; quantized with `fp8`.
        weights: float32 [M], factors of rows without padded groups."""
        if not fp8:
            return self._groups.silu_mul_groups(gate_up, groups, limit, weights)
        exact = power_of_two or self.exponents
        rows = self._groups.silu_mul_quantize_groups(gate_up, groups, exact, self.exponents, limit, weights)
        return rows.data, rows.scales

    def operand(self, rows: QuantizedRows) -> Operand:
        """Scales are read as quantized, but Blackwell's packing of float32 scales reads them row-major."""
        return rows.data, rows.scales.contiguous() if self.exponents and not rows.exponents else rows.scales

    def received(self, data: Tensor, scales: Tensor, groups: RowGroups) -> Operand:
        """Rows of groups as a dispatcher delivers them, with float32 scales. The library's own packing on Blackwell
        looks at the scales of all rows, and traps at one that is no power of two: padding may be uninitialized."""
        return data, self._groups.pack_scales(scales, groups) if self.exponents else scales

    def dense(self, a: Operand, b: Operand, out: Tensor) -> None:
        """out [M, N] bf16 = a [M, K] @ b [N, K].T."""
        self._lib.fp8_gemm_nt(a, b, out)

    @property
    def alignment(self) -> int:
        """Row alignment of group starts."""
        return int(self._lib.get_mk_alignment_for_contiguous_layout())

    def row_alignment(self, device: torch.device, mean_rows: int = 0) -> int:
        """Alignment of groups whose ends alone describe them (`grouped_by_ends`) on this device; 0: not supported.
        mean_rows: expected rows of a group; 0: not known. On Hopper it is the number of rows of a tile, which are all
        read and written."""
        if not self._needs_ends(device):
            return 0
        return SMALL_ROWS if self._aligns and 0 < MARGIN * mean_rows <= SMALL_ROWS else self.alignment

    def groups(self, offsets: Tensor, num_rows: int) -> Groups:
        """The aligned positions of rows sorted by group; offsets [G+1] int32 on the device."""
        num_groups, alignment = len(offsets) - 1, self.alignment
        offsets = offsets.long()
        counts = offsets.diff()
        padded = (counts + alignment - 1).div(alignment, rounding_mode="floor").mul_(alignment)
        starts = padded.cumsum(0) - padded  # [G]
        row = torch.arange(num_rows, device=offsets.device)
        # a dispatcher that does not wait for counts passes more rows than are valid: the rest goes after the last group
        group = torch.searchsorted(offsets[1:], row, right=True).clamp_max(num_groups - 1)
        place = (row - offsets[group] + starts[group]).to(torch.int32)
        most = most_rows(num_rows, num_groups, alignment)
        if self._needs_ends(offsets.device):
            return Groups(place, most, (starts + counts).to(torch.int32), True)
        layout = torch.full((most,), -1, dtype=torch.int32, device=offsets.device)
        layout[place] = torch.where(row < offsets[-1], group, -1).to(torch.int32)
        return Groups(place, most, layout, False)

    def aligned(self, order: ExpertOrder) -> Groups:
        """The groups of pairs sorted with this alignment, and their positions unless ends describe the groups. Pairs
        without a group share the last row, which is padding: each missing pair leaves a spare row in the worst case."""
        most = len(order.source)
        if self._needs_ends(order.ends.device):
            return Groups(order.ends, most, order.ends, True)
        place = order.positions.flatten().remainder(most)
        row = torch.arange(most, dtype=torch.int32, device=place.device)
        group = torch.searchsorted(order.offsets[1:], row, right=True, out_int32=True)
        return Groups(place, most, torch.where(order.source < 0, -1, group), False)

    def spread(self, rows: Operand | Tensor, groups: Groups) -> Operand | Tensor:
        """Copies rows to their aligned positions; padding rows stay uninitialized, their products are not read."""
        data, scales = rows if isinstance(rows, tuple) else (rows, None)
        positions = groups.place.unsqueeze(1)
        out = data.new_empty(groups.num_rows, data.shape[1])
        if scales is None:
            self.permutation.permute(data, positions, out)
            return out
        if self.exponents:
            lines = scales.new_empty(groups.num_rows, scales.shape[1])
        else:
            lines = QuantizedRows.empty(groups.num_rows, data.shape[1], data.device).scales
        self.permutation.permute(data, positions, out, scales, lines)
        return out, lines

    def grouped(self, a: Operand | Tensor, b: Operand | Tensor, out: Tensor, groups: Groups) -> None:
        """out [rows, N] = a [rows, K] @ b[g].T, b [G, N, K], g each row's group; both FP8 or both bf16."""
        fp8 = isinstance(a, tuple)
        run = self._lib.m_grouped_fp8_gemm_nt_contiguous if fp8 else self._lib.m_grouped_bf16_gemm_nt_contiguous
        run(a, b, out, groups.layout, **({"use_psum_layout": True} if groups.ends else {}))

    def grouped_by_ends(
        self, a: Operand | Tensor, b: Operand | Tensor, out: Tensor, ends: Tensor, alignment: int
    ) -> None:
        """`grouped` for groups with these ends, int32 [G]; each starts at the next multiple of `alignment`, one of
        `row_alignment`."""
        usual = self.alignment
        if alignment != usual:  # a setting of the library that its next call reads
            self._lib.set_mk_alignment_for_contiguous_layout(alignment)
        try:
            self.grouped(a, b, out, Groups(ends, len(out), ends, True))
        finally:
            if alignment != usual:
                self._lib.set_mk_alignment_for_contiguous_layout(usual)

    def masked(self, a: Operand | Tensor, b: Operand | Tensor, out: Tensor, counts: Tensor, expected: int) -> None:
        """out [G, M, N] = a [G, M, K] @ b [G, N, K], for the first counts[g] rows; `expected` rows select the tiles."""
        fp8 = isinstance(a, tuple)
        run = self._lib.m_grouped_fp8_gemm_nt_masked if fp8 else self._lib.m_grouped_bf16_gemm_nt_masked
        run(a, b, out, counts, expected)


def _runs_with_ends(lib: Any, device: torch.device) -> bool:
    """Whether Hopper's grouped product accepts group ends: builds of early 2026 have the argument but fail an
    assertion. Tests one product of the smallest size."""
    rows = int(lib.get_mk_alignment_for_contiguous_layout())
    a = torch.zeros(rows, BLOCK, dtype=torch.bfloat16, device=device)
    b = torch.zeros(1, BLOCK, BLOCK, dtype=torch.bfloat16, device=device)
    ends = torch.full((1,), rows, dtype=torch.int32, device=device)
    try:
        lib.m_grouped_bf16_gemm_nt_contiguous(a, b, torch.empty_like(a), ends, use_psum_layout=True)
    except (RuntimeError, AssertionError, TypeError):
        return False
    return True


def _capability() -> tuple[int, int]:
    from moe_engine.kernels.device import probe

    capability = probe("cuda").capability
    assert capability is not None
    return capability


def _quantization() -> Any:
    try:
        return importlib.import_module("moe_engine.kernels.quantization.triton_rows")
    except ImportError:
        return reference


def _groups(quantization: Quantization) -> GroupQuantization:
    """The kernels for groups that match `quantization` (Triton or torch)."""
    if quantization is reference:
        return group_reference
    from moe_engine.kernels.quantization import triton_groups

    return triton_groups


def _heads_quantized(quantization: Quantization) -> Callable[..., QuantizedActivation] | None:
    """The product per head that matches `quantization`, if Triton."""
    if quantization is reference:
        return None
    from moe_engine.kernels.linear.triton_heads import heads_quantized

    return heads_quantized


def _permutation(quantization: Quantization) -> Permutation:
    """The permutation kernels that match `quantization` (Triton or torch)."""
    if quantization is reference:
        return TorchPermutation()
    from moe_engine.kernels.permutation.triton_permute import TritonPermutation

    return TritonPermutation()
