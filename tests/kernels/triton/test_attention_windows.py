"""Sliding windows of grouped-query attention, under the interpreter: no row outside a window is read."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cpu.formulas import normal
from tests.kernels.reference.test_windows import LENS, WINDOWS, check_fp8, check_poisoned, check_sinks, filled, windowed

pytestmark = pytest.mark.drawn(5)

triton_attention = pytest.importorskip("moe_engine.kernels.attention.triton.attention", reason="needs triton")
TritonGQA = triton_attention.TritonGQA


@pytest.mark.parametrize("window", WINDOWS)
def test_nothing_outside_the_window_is_read(window: int) -> None:
    backend = TritonGQA(num_programs=9)
    assert backend.capabilities.windows
    check_poisoned(backend, window, torch.bfloat16)


@pytest.mark.parametrize("window", [20, 5000])
def test_sinks(window: int) -> None:
    check_sinks(TritonGQA(num_programs=9), window, torch.float32)


def test_fp8_rows() -> None:
    check_fp8(TritonGQA(num_programs=5))


def test_deterministic_bits_do_not_depend_on_the_batch() -> None:
    from dataclasses import replace

    from tests.kernels.cpu.formulas import only

    backend = TritonGQA(deterministic=True)
    queries, size = windowed(LENS, 16, 600, poisoned=False)
    keys, values = (torch.nan_to_num(filled(queries, size, 2, 32, dtype=torch.bfloat16)) for _ in range(2))
    q = normal(queries.num_tokens, 8, 32, dtype=torch.bfloat16)
    whole = backend.paged(q, keys, values, queries, 0.2, None).split(queries.query_lens)
    for request, mine in enumerate(q.split(queries.query_lens)):
        alone = replace(only(queries, request), window=600)
        assert torch.equal(backend.paged(mine, keys, values, alone, 0.2, None), whole[request])
