"""Rows of a decode arrive with the alignment that the kernel takes for the expected rows of an expert."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_engine.kernels.quantization.protocol import UNQUANTIZED
from moe_engine.parallel.dispatch.build import PhasedDispatcher
from moe_engine.parallel.dispatch.protocol import Phase
from moe_engine.parallel.experts import DispatchedExperts


@pytest.mark.parametrize(
    "phase,tokens,asked",
    [("decode", 0, 0), ("decode", 1, 1), ("decode", 128, 32), ("decode", 129, 33), ("prefill", 128, 0)],
)
@pytest.mark.parametrize("supported", [True, False])
def test_rows_arrive_with_the_alignment_of_their_number(phase: Phase, tokens: int, asked: int, supported: bool) -> None:
    """Eight choices of each token over as many ranks as there are: 32 experts of each get tokens * 8 / 32 rows."""
    found: list[int] = []
    dispatcher: Any = SimpleNamespace(
        takes_rows=False, combine=lambda rows, weights, handle: rows,
        dispatch=lambda x, ids, weights, format: found.append(format.row_alignment) or (x, None),
    )  # fmt: skip
    able = SimpleNamespace(row_alignment=lambda weights, mean: 2 + mean if supported else 0, column_scales=False)
    kernel: Any = SimpleNamespace(
        input_format=lambda weights: UNQUANTIZED, run=lambda batch, weights: batch, capabilities=able
    )
    weights: Any = SimpleNamespace(num_experts=32)
    experts = DispatchedExperts(PhasedDispatcher(lambda: {phase: dispatcher}), kernel, weights)
    ids = torch.zeros(tokens, 8, dtype=torch.int32)
    experts.run(torch.zeros(tokens, 16), ids.float(), ids, phase=phase)
    assert found == [2 + asked if supported else 1]
