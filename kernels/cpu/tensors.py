"""Shared by the CPU rows: dtypes, packed weights and paged queries in the library's formats."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention_windows import window_number
from moe_engine.kernels.kv_format import head_records, latent_records
from moe_engine.kernels.kv_format.formats import PLAIN
from moe_engine.kernels.queries import AttentionBatch, PagedQueries

KIND = {torch.float32: 0, torch.bfloat16: 1}
ANY_KIND = -1
"""Kind of coded weights, which are multiplied with rows of any of these dtypes."""


def kind_of(dtype: torch.dtype) -> int:
    """0 for float32, 1 for bfloat16, the first argument of every library function."""
    try:
        return KIND[dtype]
    except KeyError:
        raise TypeError(f"the CPU kernels have no {dtype}; use bfloat16 or float32") from None


def common_kind(kinds: Iterable[int | None]) -> int | None:
    """The kind of rows that weights of these kinds take in one call; None if they differ or one is None."""
    found = set(kinds)
    if len(found) > 1:
        found.discard(ANY_KIND)
    return found.pop() if len(found) == 1 else None


def latent_form(cache: Tensor, dtype: torch.dtype, latent: int, rotary: int) -> int:
    """Row format of MLA's cache (`kv_format`), for activations of `dtype`.

    Raises:
        ValueError: if the rows are neither `dtype` values nor FP8 rows of these widths.
    """
    if cache.stride(-1) == 1:
        if cache.dtype == dtype:
            return PLAIN
        if cache.element_size() == 1:
            return latent_records.form_of(cache, latent, rotary)
    raise ValueError(f"activations are {dtype}, the context is {cache.dtype} with strides {cache.stride()}")


def head_form(cache: Tensor, dtype: torch.dtype, width: int) -> int:
    """Row format of GQA's keys or values."""
    if cache.stride(-1) == 1:
        if cache.dtype == dtype:
            return PLAIN
        if cache.element_size() == 1:
            return head_records.form_of(cache, width)
    raise ValueError(f"activations are {dtype}, the context is {cache.dtype} with strides {cache.stride()}")


def rows(x: Tensor) -> Tensor:
    """x with its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@dataclass(frozen=True, slots=True)
class Panels:
    """`PreparedLinear.data` of the C++ row."""

    kind: int
    weight: int  # address of `storage`
    bias: int | None  # address of `padded_bias`
    storage: Tensor
    padded_bias: Tensor | None
    heads: int = 1
    form: int | None = None  # address of a `coded.Coding`; None: plain panels


@dataclass(frozen=True, slots=True)
class ExpertPanels:
    """`ExpertWeights.data` of the C++ row."""

    kind: int
    address: int
    storage: Tensor  # [E, bytes]: gate, up and down panels of each expert
    down_offset: int
    up_offset: int
    form: int | None = None  # address of a `coded.Coding`, of gate and up; None: plain panels
    down_form: int | None = None  # of down


class _Queries(ctypes.Structure):
    _fields_ = [
        ("requests", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("contexts", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slots_row", ctypes.c_int64),
        ("visible", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("first", ctypes.c_void_p),
        ("outside", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class QueriesPointer:
    """A C struct of `queries` and the tensors it points to."""

    address: int
    keep: tuple[Any, ...]


def pointer(queries: PagedQueries) -> QueriesPointer:
    def plain(x: Tensor) -> Tensor:
        return x if x.dtype == torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()

    parts = plain(queries.rows), plain(queries.query_starts), plain(queries.context_lens_device)
    table = queries.slot_table
    if table.dtype != torch.int32 or table.stride(-1) != 1:
        table = plain(table)
    visible = None if queries.visible is None else queries.visible.contiguous()
    struct = _Queries(
        queries.num_requests, *(p.data_ptr() for p in parts), table.data_ptr(), table.stride(0),
        None if visible is None else visible.data_ptr(), window_number(queries.window),
    )  # fmt: skip
    return QueriesPointer(ctypes.addressof(struct), (struct, table, visible, *parts))


@dataclass(frozen=True, slots=True)
class Plan:
    """The two groups of a step as C structs, built once per step instead of once per layer."""

    batch: AttentionBatch
    decode: QueriesPointer | None
    prefill: QueriesPointer | None

    @staticmethod
    def of(batch: AttentionBatch) -> Plan:
        return Plan(
            batch,
            pointer(batch.decode) if batch.decode is not None else None,
            pointer(batch.prefill) if batch.prefill is not None else None,
        )


def find(queries: PagedQueries, plan: Any) -> QueriesPointer:
    """The plan's struct of `queries`, or a new one if the plan does not contain them."""
    if isinstance(plan, Plan):
        if queries is plan.batch.decode and plan.decode is not None:
            return plan.decode
        if queries is plan.batch.prefill and plan.prefill is not None:
            return plan.prefill
    return pointer(queries)
