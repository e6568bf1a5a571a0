"""An emulator of DeepGEMM 2.x by its sources, on the CPU: csrc/apis/{gemm,layout}.hpp, csrc/utils/layout.hpp,
deep_gemm/include/deep_gemm/scheduler/gemm.cuh. Written without the adapter's code; rows outside all tiles are NaN.

Legend: M rows, N out-features, K in-features, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.vendors.contract import check_shape, must, poison
from tests.kernels.vendors.library_calls import launched

FP8 = torch.float8_e4m3fn
ALIGNMENT = 128
NUM_SMS = 132
EXPONENT = 0x7F800000


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def align(x: int, y: int) -> int:
    return ceil_div(x, y) * y


class DeepGemmEmulator:
    """The functions that the adapters call. `module` is the emulated module.

    Args:
        arch: 9 or 10. takes_ends: True if this build supports the psum layout.

    Attributes:
        alignment: of contiguous groups, in rows.
        transposed: number of transpositions of activation scales into the kernel's layout.
        pdl: True if programmatic dependent launch is on; builds without group ends cannot set it.
        compiled: keys of the kernels compiled so far; `sealed` forbids more.
    """

    def __init__(self, arch: int = 9, takes_ends: bool = True) -> None:
        self.arch = arch
        self.transposed = self.packed = 0  # scales of activations, in calls
        self.alignment = ALIGNMENT
        self.compiled: set[tuple[Any, ...]] = set()
        self.sealed = self.pdl = False
        contiguous = self.contiguous_with_ends if takes_ends else self.contiguous
        bf16 = self.bf16_contiguous_with_ends if takes_ends else self.bf16_contiguous
        self.module = SimpleNamespace(
            __name__="deep_gemm",
            fp8_gemm_nt=self._launched(self.fp8_gemm_nt),
            m_grouped_fp8_gemm_nt_contiguous=self._launched(contiguous),
            m_grouped_fp8_gemm_nt_masked=self._launched(self.masked),
            m_grouped_bf16_gemm_nt_contiguous=self._launched(bf16),
            m_grouped_bf16_gemm_nt_masked=self._launched(self.bf16_masked),
            transform_sf_into_required_layout=self._launched(self.transform_sf_into_required_layout),
            get_mk_alignment_for_contiguous_layout=lambda: self.alignment,
            fp8_fp4_mqa_logits=self._launched(self.mqa_logits if takes_ends else self.mqa_logits_or_clean),
        )
        if takes_ends:
            self.module.set_pdl = self.set_pdl
            self.module.set_mk_alignment_for_contiguous_layout = self.set_alignment

    def _launched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """One launch: settings are compiled into it, also where a graph replays it."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            alignment = self.alignment

            @wraps(function)
            def launch(*args: Any, **kwargs: Any) -> Any:
                current, self.alignment = self.alignment, alignment
                try:
                    return function(*args, **kwargs)
                finally:
                    self.alignment = current

            return launched(launch)(*args, **kwargs)

        return call

    # entry points

    def set_pdl(self, enable: bool) -> None:
        self.pdl = enable

    def set_alignment(self, rows: int) -> None:
        """csrc/jit_kernels/heuristics/sm90.hpp: it is the tile's number of rows in contiguous products, and sm90's
        kernels have tiles of 64, 128 or 256 rows, or fewer in whole lines of eight."""
        must(isinstance(rows, int) and rows > 0, f"alignment {rows}")
        must(self.arch == 10 or rows in (64, 128, 256) or (rows < 64 and rows % 8 == 0), f"no tile of {rows} rows")
        self.alignment = rows

    def mqa_logits(self, q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k, schedule_meta=None):
        """sgl-deep-gemm 0.2.5: compressed logits [S, max_seqlen_k] of float32, rows of 1024 n bytes, by the asserts of
        csrc/apis/attention.hpp in its binary; outside [0, end - start) undefined."""
        (q, q_scales), (keys, scales) = q, kv
        count, heads, width = q.shape
        must(self.arch == 9 and q_scales is None, "is_mx_sf == (arch_major == 10 or ...)")
        must(q.dtype == keys.dtype == FP8 and q.is_contiguous() and keys.is_contiguous(), "e4m3, contiguous")
        must(heads in (32, 64) and width in (32, 64, 128), f"q {q.shape}")
        check_shape(keys, (len(keys), width), "keys")
        check_shape(scales, (len(keys),), "scales of keys")
        check_shape(weights, (count, heads), "weights")
        must(weights.stride(1) == 1 and weights.stride(0) * 4 % 16 == 0, "rows of weights")
        must(scales.dtype == weights.dtype == torch.float32 and scales.is_contiguous(), "float32 scales and weights")
        for name, lens in (("start", cu_seq_len_k_start), ("end", cu_seq_len_k_end)):
            check_shape(lens, (count,), name)
            must(lens.dtype == torch.int32 and lens.is_contiguous(), f"{name} {lens}")
            must(bool(((lens >= 0) & (lens <= len(keys))).all()), f"{name} {lens}")
        spans = cu_seq_len_k_end - cu_seq_len_k_start
        must(schedule_meta is None and max_seqlen_k > 0 and int(spans.max()) <= max_seqlen_k, "max_seqlen_k > 0")
        self._compile("mqa_logits", heads, width, 1, 0)
        products = torch.einsum("thi,si->ths", q.double(), keys.double()).relu()
        exact = (torch.einsum("ths,th->ts", products, weights.double()) * scales.double()).float()
        out = poison(count, align(max_seqlen_k, 256), dtype=torch.float32)[:, :max_seqlen_k]
        for row, (start, end) in enumerate(zip(cu_seq_len_k_start.tolist(), cu_seq_len_k_end.tolist())):
            out[row, : max(end - start, 0)] = exact[row, start:end]
        return out

    def mqa_logits_or_clean(
        self, q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0,
        logits_dtype=torch.float32,
    ):  # fmt: skip
        """Builds of 2026's first half: `max_seqlen_k` compresses, and does not go with `clean_logits`."""
        must(not clean_logits and max_seqlen_k and logits_dtype == torch.float32, "not emulated")
        return self.mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k)

    def fp8_gemm_nt(
        self, a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk", disable_ue8m0_cast=False
    ):
        (m, k), (n, k2) = self._values(a[0], 2), self._values(b[0], 2)
        must(k == k2, f"K {k} and {k2}")
        self._output(d, (m, n))
        must(c is None and recipe is None and not disable_ue8m0_cast, "not emulated")
        if m == 0:
            return
        sa, sb = self._scale_pair(a[1], b[1], m, n, k, None, None)
        self._compile("dense", n, k, 1, self._tile(m, n))
        d.copy_(_product(a[0], sa, b[0], sb))

    def contiguous_with_ends(
        self, a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
        disable_ue8m0_cast=False, use_psum_layout=False, ensure_zero_padding=True, expected_m_for_psum_layout=None,
    ):  # fmt: skip
        (m, k), (g, n, k2) = self._values(a[0], 2), self._values(b[0], 3)
        must(k == k2, f"K {k} and {k2}")
        self._output(d, (m, n))
        spans = (_ends if use_psum_layout else _indices)(grouped_layout, g, m, self.alignment)
        if m == 0:
            return
        read = torch.zeros(m, dtype=torch.bool)
        for start, stop, _ in spans:
            read[start:stop] = True
        if use_psum_layout and self.arch == 10 and a[1].dtype == torch.float32:
            must(a[1].is_contiguous(), "packing of scales over groups with ends reads contiguous scales")
        sa, sb = self._scale_pair(a[1], b[1], m, n, k, None, g, read, skips_gaps=use_psum_layout)
        self._compile("contiguous", n, k, g, (self.alignment, *self._tile(m, n)[1:]))
        out = poison(m, n, dtype=torch.bfloat16)
        for start, stop, group in spans:
            out[start:stop] = _product(a[0][start:stop], sa[start:stop], b[0][group], sb[group])
        d.copy_(out)

    def contiguous(
        self, a, b, d, m_indices, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
        disable_ue8m0_cast=False,
    ):  # fmt: skip
        self.contiguous_with_ends(a, b, d, m_indices, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)

    def masked(
        self, a, b, d, masked_m, expected_m, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
        disable_ue8m0_cast=False,
    ):  # fmt: skip
        (g, m, k), (g2, n, k2) = self._values(a[0], 3), self._values(b[0], 3)
        must(g == g2 and k == k2, "groups or K differ")
        self._output(d, (g, m, n))
        _check_counts(masked_m, g, m, expected_m)
        read = torch.arange(m)[None] < masked_m[:, None]
        sa, sb = self._scale_pair(a[1], b[1], m, n, k, g, g, read)
        self._compile("masked", n, k, g, (m, expected_m))
        out = poison(g, m, n, dtype=torch.bfloat16)
        for group, count in enumerate(masked_m.tolist()):
            out[group, :count] = _product(a[0][group, :count], sa[group, :count], b[0][group], sb[group])
        d.copy_(out)

    def bf16_contiguous_with_ends(
        self, a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False, ensure_zero_padding=True,
        expected_m_for_psum_layout=None,
    ):  # fmt: skip
        (m, k), (g, n, k2) = _bf16(a, 2), _bf16(b, 3)
        must(k == k2, f"K {k} and {k2}")
        self._output(d, (m, n))
        spans = (_ends if use_psum_layout else _indices)(grouped_layout, g, m, self.alignment)
        self._compile("bf16 contiguous", n, k, g, (self.alignment, *self._tile(max(m, 1), n)[1:]))
        out = poison(m, n, dtype=torch.bfloat16)
        for start, stop, group in spans:
            out[start:stop] = (a[start:stop].double() @ b[group].double().T).to(torch.bfloat16)
        d.copy_(out)

    def bf16_contiguous(self, a, b, d, m_indices, compiled_dims="nk"):
        self.bf16_contiguous_with_ends(a, b, d, m_indices)

    def bf16_masked(self, a, b, d, masked_m, expected_m, compiled_dims="nk"):
        (g, m, k), (g2, n, k2) = _bf16(a, 3), _bf16(b, 3)
        must(g == g2 and k == k2, "groups or K differ")
        self._output(d, (g, m, n))
        _check_counts(masked_m, g, m, expected_m)
        self._compile("bf16 masked", n, k, g, (m, expected_m))
        out = poison(g, m, n, dtype=torch.bfloat16)
        for group, count in enumerate(masked_m.tolist()):
            out[group, :count] = (a[group, :count].double() @ b[group].double().T).to(torch.bfloat16)
        d.copy_(out)

    def transform_sf_into_required_layout(
        self, sf, mn, k, recipe, num_groups=None, is_sfa=None, disable_ue8m0_cast=False, psum_layout=None
    ):
        must(len(recipe) == 3 and is_sfa is not None, "a recipe of three needs is_sfa")
        gran = recipe[0] if is_sfa else recipe[1]
        self._check_scales(sf, mn, k, gran, num_groups)
        if self.arch == 9:
            must(sf.dtype == torch.float32 and gran in (1, 128), "unknown transformation")
            if gran == 1:
                return _columns(sf, mn)
            must(_plain_or_transposed(sf), "weight scales must be contiguous, or transposed")
            return sf
        if sf.dtype == torch.int32:
            must(gran == 1, "packed scales are for single rows")
            self._check_columns(sf, mn)
            return sf
        wide = sf.repeat_interleave(gran, -2)[..., :mn, :]
        return _packed(wide)

    # checks of a real call

    def _values(self, x: Tensor, dims: int) -> tuple[int, ...]:
        must(x.dtype == FP8 and x.dim() == dims, f"operand must be e4m3 of {dims} dimensions, is {x.dtype} {x.dim()}")
        _check_memory(x)
        return tuple(x.shape)

    def _output(self, d: Tensor, shape: tuple[int, ...]) -> None:
        check_shape(d, shape, "d")
        must(d.dtype == torch.bfloat16, f"d must be bf16, is {d.dtype}")
        _check_memory(d)

    def _check_scales(self, sf: Tensor, mn: int, k: int, gran: int, groups: int | None) -> None:
        must(sf.dtype in (torch.float32, torch.int32), f"scales are {sf.dtype}")
        columns = ceil_div(k, 128 if sf.dtype == torch.float32 else 512)
        check_shape(sf, (*([] if groups is None else [groups]), ceil_div(mn, gran), columns), "scales")

    def _check_columns(self, sf: Tensor, mn: int) -> None:
        """MN-major, aligned to 16 bytes."""
        must(sf.stride(-2) == 1 or mn == 1, "scales must be MN-major")
        must(sf.stride(-1) == align(mn, 4), f"columns of scales {sf.stride(-1)} apart, not {align(mn, 4)}")
        must(sf.dim() == 2 or sf.stride(0) == sf.stride(-1) * sf.shape[-1], "groups of scales must be contiguous")

    def _scale_pair(self, sfa, sfb, m, n, k, groups_a, groups_b, read=None, skips_gaps=False):
        """The scales as float32 [.., M, K/128] and [.., N/128 or N, K/128]."""
        if self.arch == 9:
            must(sfa.dtype == torch.float32 and sfb.dtype == torch.float32, "Hopper takes float32 scales")
            self._check_scales(sfa, m, k, 1, groups_a)
            self.transposed += not _is_columns(sfa, m)
            self._check_scales(sfb, n, k, 128, groups_b)
            must(_plain_or_transposed(sfb), "weight scales must be contiguous, or transposed")
            return sfa, sfb.repeat_interleave(128, -2)[..., :n, :]
        gran_b = 128 if sfb.dtype == torch.float32 else 1
        self._check_scales(sfa, m, k, 1, groups_a)
        self._check_scales(sfb, n, k, gran_b, groups_b)
        self.packed += sfa.dtype == torch.float32
        return self._exponents(sfa, m, k, 1, read, skips_gaps), self._exponents(sfb, n, k, gran_b, None)

    def _exponents(
        self, sf: Tensor, mn: int, k: int, gran: int, read: Tensor | None, skips_gaps: bool = False
    ) -> Tensor:
        """The exponents of scales, as powers of two. impls/smxx_layout.cuh: packing traps at a sign or a mantissa in
        any row, also in rows that no product reads, unless it knows the gaps between groups."""
        if sf.dtype == torch.int32:
            self._check_columns(sf, mn)
            return _unpacked(sf, ceil_div(k, 128))
        wide = sf.repeat_interleave(gran, -2)[..., :mn, :]
        if not skips_gaps:
            must(bool(((wide.contiguous().view(torch.int32) & ~EXPONENT) == 0).all()), "a mantissa: device assertion")
        looked_at = wide if read is None else wide[read]
        must(_powers_of_two(looked_at), "scales must be powers of two: the library drops their mantissas")
        return (wide.contiguous().view(torch.int32) & EXPONENT).view(torch.float32)

    # just-in-time compilation

    def _tile(self, m: int, n: int) -> tuple[int, int]:
        """A tile by the heuristics: fewest waves, then fewest padded rows, then the largest."""
        rows = [64, 128, 256] + ([16] if m <= 16 else []) + ([32] if m <= 32 else [])
        choices = [(bm, bn) for bm in rows for bn in (64, 96, 128, 160, 192) if bm <= 128 or bn <= 128]

        def cost(tile: tuple[int, int]) -> tuple[int, int, int]:
            waves = ceil_div(ceil_div(m, tile[0]) * ceil_div(n, tile[1]), NUM_SMS)
            return waves, align(m, tile[0]), -tile[0] * tile[1]

        return min(choices, key=cost)

    def _compile(self, kind: str, n: int, k: int, groups: int, tile: Any) -> None:
        key = (kind, n, k, groups, tile)
        must(key in self.compiled or not self.sealed, f"compiles after READY: {key}")
        self.compiled.add(key)


def _product(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> Tensor:
    """a [M, K] * sa [M, K/128] times b [N, K] * sb [N, K/128], in float64."""
    return (_scaled(a, sa) @ _scaled(b, sb).T).to(torch.bfloat16)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    return values.double() * scales.double().repeat_interleave(128, -1)[:, : values.shape[1]]


def _check_memory(x: Tensor) -> None:
    """Requirements of the tensor memory accelerator: contiguous last dimension and batches, strides of 16 bytes."""
    must(x.stride(-1) == 1, "the last dimension must be contiguous")
    must(x.shape[-2] <= 1 or x.stride(-2) * x.element_size() % 16 == 0, f"rows {x.stride(-2)} apart: not 16 bytes")
    must(x.dim() == 2 or x.stride(0) == x.shape[1] * x.shape[2], "groups must be contiguous")
    must(x.numel() == 0 or x.data_ptr() % 16 == 0, "memory must start at 16 bytes")


def _bf16(x: Tensor, dims: int) -> tuple[int, ...]:
    must(x.dtype == torch.bfloat16 and x.dim() == dims, f"operand must be bf16 of {dims} dimensions, is {x.dtype}")
    _check_memory(x)
    return tuple(x.shape)


def _check_counts(masked_m: Tensor, groups: int, m: int, expected_m: int) -> None:
    must(masked_m.dtype == torch.int32 and masked_m.is_contiguous(), "masked_m must be contiguous int32")
    check_shape(masked_m, (groups,), "masked_m")
    must(isinstance(expected_m, int) and expected_m > 0 and m > 0, "expected_m and M must be positive")
    must(bool(((masked_m >= 0) & (masked_m <= m)).all()), "counts exceed the rows")


def _ends(layout: Tensor, groups: int, m: int, alignment: int) -> list[tuple[int, int, int]]:
    """(first row, end, group) where each group starts at the aligned end of the previous group."""
    must(layout.dtype == torch.int32 and layout.is_contiguous(), "layout must be contiguous int32")
    check_shape(layout, (groups,), "layout of ends")
    spans, start = [], 0
    for group, end in enumerate(layout.tolist()):
        must(start <= end <= m, f"group {group} ends at {end}, starts at {start}, of {m} rows")
        spans.append((start, end, group))
        start = align(end, alignment)
    return spans


def _indices(layout: Tensor, groups: int, m: int, alignment: int) -> list[tuple[int, int, int]]:
    """(first row, end, group) of each tile; the group of its first row decides, -1 skips it."""
    must(layout.dtype == torch.int32 and layout.is_contiguous(), "layout must be contiguous int32")
    check_shape(layout, (m,), "layout of rows")
    spans = []
    for start in range(0, m, alignment):
        tile = layout[start : start + alignment].tolist()
        group, count = tile[0], sum(index >= 0 for index in tile)
        must(-1 <= group < groups, f"group {group} of {groups}")
        must(tile == [group] * count + [-1] * (len(tile) - count), f"rows of several groups in the tile at {start}")
        if group >= 0:
            spans.append((start, start + count, group))
    return spans


def _plain_or_transposed(sf: Tensor) -> bool:
    rows, columns = sf.shape[-2:]
    batches = sf.dim() == 2 or sf.stride(0) == rows * columns
    return batches and ((sf.stride(-1), sf.stride(-2)) in ((1, columns), (rows, 1)) or rows == 1 or columns == 1)


def _is_columns(sf: Tensor, mn: int) -> bool:
    batches = sf.dim() == 2 or sf.stride(0) == align(mn, 4) * sf.shape[-1]
    return batches and (sf.stride(-2) == 1 or mn == 1) and sf.stride(-1) == align(mn, 4)


def _columns(sf: Tensor, mn: int) -> Tensor:
    out = torch.empty(*sf.shape[:-2], sf.shape[-1], align(mn, 4)).transpose(-1, -2)[..., :mn, :]
    return out.copy_(sf)


def _powers_of_two(sf: Tensor) -> bool:
    bits = sf.contiguous().view(torch.int32)
    return bool(((bits & ~EXPONENT) == 0).all()) and bool((bits > 0).all())


def _packed(sf: Tensor) -> Tensor:
    """float32 [.., MN, K/128] -> int32 [.., MN, K/512], MN-major: four exponents in each, lowest first."""
    must(_powers_of_two(sf), "scales must be powers of two: the library drops their mantissas")
    mn, columns = sf.shape[-2:]
    bytes_ = (sf.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    padded = torch.zeros(*sf.shape[:-1], align(columns, 4), dtype=torch.uint8)
    padded[..., :columns] = bytes_
    words = padded.view(torch.int32)
    out = torch.zeros(*sf.shape[:-2], words.shape[-1], align(mn, 4), dtype=torch.int32).transpose(-1, -2)[..., :mn, :]
    return out.copy_(words)


def _unpacked(words: Tensor, columns: int) -> Tensor:
    exponents = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)[..., :columns].to(torch.int32)
    return (exponents << 23).view(torch.float32)
