"""Attention over selected tokens in the Triton row, under the interpreter, against float64: all other rows are NaN."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.attention.selected import Selected, Shift, Turn
from moe_engine.kernels.kv_format import latent_records
from moe_engine.kernels.kv_format.formats import FP8_GROUPS
from moe_engine.kernels.ops.protocol import RotaryTable
from tests.kernels.cpu.formulas import NAN, attend, close, close_rows, normal, selected_attention
from tests.kernels.row_checks import check_sinks_over_whole_rows

triton_attention = pytest.importorskip("moe_engine.kernels.attention.triton.attention", reason="needs triton")
COUNTS = [1, 7, 64, 90, 33]
ROTARY = 64


@pytest.mark.parametrize(
    ("heads", "latent", "dtype", "fp8"),
    [(5, 40, torch.float32, False), (16, 128, torch.bfloat16, False), (5, 128, torch.bfloat16, True)],
)
def test_reads_the_selected_rows_only(heads: int, latent: int, dtype: torch.dtype, fp8: bool) -> None:
    size = 300
    cache = torch.full((size, latent + ROTARY), NAN, dtype=dtype)
    slots = torch.full((len(COUNTS), max(COUNTS)), -1, dtype=torch.int32)
    for row, count in zip(slots, COUNTS):
        row[:count] = torch.randperm(size)[:count].int()
        cache[row[:count].long()] = normal(count, latent + ROTARY, dtype=dtype)
    stored = cache
    if fp8:
        stored = latent_records.pack(cache, latent, FP8_GROUPS)
        cache = latent_records.unpack(stored, latent, ROTARY)
    selected = Selected(torch.full_like(slots, 2**30), COUNTS, torch.tensor(COUNTS, dtype=torch.int32))
    sparse = triton_attention.TritonMLA(num_programs=7).capabilities.sparse
    q, plan = normal(len(COUNTS), heads, latent + ROTARY, dtype=dtype), sparse.plan(selected)
    selected.slots.copy_(slots)  # after the plan, as in a layer
    for _ in range(2):
        got = sparse.run(q, stored, selected, 0.1, plan, latent)
        close_rows(got, selected_attention(q, cache, slots, COUNTS, 0.1, latent), 3)


@pytest.mark.parametrize("heads", [5, 16])
@pytest.mark.parametrize(("width", "dtype"), [(48, torch.float32), (128, torch.bfloat16)])
def test_sinks_over_rows_that_are_values(heads: int, width: int, dtype: torch.dtype) -> None:
    """One program a request, and contexts that several programs share."""
    for num_programs in (1, 9):
        backend = triton_attention.TritonMLA(num_programs=num_programs)
        check_sinks_over_whole_rows(backend, dtype, heads, width, COUNTS)


def test_a_list_of_another_cache_is_shifted() -> None:
    """The bits of a list with the slots themselves; slots below the first one stay."""
    cache, counts = torch.randn(300, 128).bfloat16(), torch.tensor(COUNTS, dtype=torch.int32)
    slots = torch.randint(0, 150, (len(COUNTS), max(COUNTS)), dtype=torch.int32)
    sparse = triton_attention.TritonMLA(num_programs=7).capabilities.sparse
    q, results = torch.randn(len(COUNTS), 8, 128).bfloat16(), []
    for shift, own in ((Shift(60, 140), slots), (None, torch.where(slots >= 60, slots + 140, slots))):
        selected = Selected(own, COUNTS, counts, shift)
        results.append(sparse.run(q, cache, selected, 0.1, sparse.plan(selected), 128))
    assert sparse.shifts and torch.equal(*results)


@pytest.mark.parametrize(
    ("heads", "width", "turned", "dtype"),
    [(5, 48, 32, torch.float32), (5, 128, 64, torch.float32), (64, 128, 64, torch.bfloat16)]
    + [(8, 128, 128, torch.bfloat16), (80, 64, 16, torch.bfloat16)],
)
def test_results_are_turned_back(heads: int, width: int, turned: int, dtype: torch.dtype) -> None:
    """Against complex numbers in float64; one program a request, and contexts that several programs share."""
    cache, counts = normal(200, width, dtype=dtype), torch.tensor(COUNTS, dtype=torch.int32)
    slots = torch.randint(0, 200, (len(COUNTS), max(COUNTS)), dtype=torch.int32)
    angles, positions = torch.randn(40, turned // 2) * 3, torch.randint(0, 40, (len(COUNTS),))
    table = RotaryTable(torch.cat((angles.cos(), angles.sin()), 1), True)
    q, sinks = normal(len(COUNTS), heads, width, dtype=dtype), torch.randn(heads)
    for num_programs in (1, 9):
        sparse = triton_attention.TritonMLA(num_programs=num_programs).capabilities.sparse
        selected = Selected(slots, COUNTS, counts)
        got = sparse.turned(q, cache, selected, 0.1, sparse.plan(selected), width, sinks, Turn(positions, table))
        for token, count in enumerate(COUNTS):
            keys = cache[slots[token, :count].long()].unsqueeze(1)
            wanted = attend(q[token : token + 1], keys, keys, 0.1, sinks=sinks)
            pairs = torch.view_as_complex(wanted[..., width - turned :].double().unflatten(-1, (-1, 2)).contiguous())
            back = torch.polar(torch.ones(turned // 2).double(), -angles[positions[token]].double())
            wanted = torch.cat((wanted[..., : width - turned], torch.view_as_real(pairs * back).flatten(-2)), -1)
            close(got[token : token + 1], wanted, 3)
