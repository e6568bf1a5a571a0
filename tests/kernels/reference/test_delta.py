"""The gated delta net of every row that runs on a CPU against its recurrence in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.kernels import tables
from moe_engine.kernels.delta.protocol import DeltaInputs, DeltaShape, DeltaStates, DeltaWeights, StateRuns
from moe_engine.kernels.registry import Choice
from tests.kernels.drawn import delta_inputs
from tests.models.rows import cpu_rows_of

ROWS = [row.name for row in cpu_rows_of(tables.DELTA)]
SHAPES = (
    DeltaShape(2, 4, 8, 12, 4),
    DeltaShape(1, 3, 16, 80, 2, sigmoid=True),
    DeltaShape(3, 3, 24, 32, 3, decays=24, sigmoid=True),
    DeltaShape(1, 2, 20, 12, 2, decays=20, bound=-5.0),
    DeltaShape(2, 6, 24, 20, 4, additive=True),
    DeltaShape(1, 2, 16, 64, 3, additive=True, shortest=0.4, longest=0.9),
    DeltaShape(3, 3, 24, 20, 0, additive=True, shortest=1.0, longest=1.0),
)
"""With a decay for each value head, for each channel of a key, and without the delta rule."""


def wide(part: Any) -> Any:
    return type(part)(*(x.double() for x in part))


def recurrence(
    inputs: DeltaInputs, weights: DeltaWeights, states: DeltaStates, runs: StateRuns, shape: DeltaShape
) -> Tensor:
    """Token by token, head by head, in float64; stores states."""
    out = []
    conv, a_log, dt_bias, norm = (getattr(weights, name).double() for name in ("conv", "a_log", "dt_bias", "norm"))
    for i, count in enumerate(runs.lens):
        begin, row = int(runs.starts[i]), int(runs.reads[i])
        tail, memory = states.tail[row].clone(), states.memory[row].clone()
        for t in range(begin, begin + count):
            taken = inputs.mixed[t]
            if shape.taps:
                text = torch.cat((tail, taken[:, None]), 1)  # [Hk, K, C]
                tail = text[:, 1:]
                taken = (text * conv).sum(1)
                if weights.conv_bias is not None:
                    taken = taken + weights.conv_bias.double()
                taken = taken * taken.sigmoid()
            if shape.additive:
                out.append(additive_token(taken, inputs, t, weights, memory, shape))
                if (row := int(runs.rows[t])) >= 0:
                    states.tail[row], states.memory[row] = tail, memory
                continue
            token = []
            for h in range(shape.value_heads):
                head, place = divmod(h, shape.shared)
                q, k, values = taken[head].split((shape.key, shape.key, shape.shared * shape.value))
                v = values[place * shape.value : (place + 1) * shape.value]
                z = inputs.z[t, head, place * shape.value : (place + 1) * shape.value]
                q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
                a = inputs.a[t, head].view(shape.shared, shape.decays)[place] + dt_bias.view(-1, shape.decays)[h]
                rate, beta = a_log[h].exp(), inputs.b[t, head, place].sigmoid()
                decay = shape.bound * (rate * a).sigmoid() if shape.bound else -rate * torch.log1p(a.exp())
                state = decay.exp()[:, None] * memory[h]
                memory[h] = state + torch.outer(k, beta * (v - k @ state))
                found = q @ memory[h] / math.sqrt(shape.key)
                found = norm * found / (found.square().mean() + weights.eps).sqrt()
                token.append(found * z.sigmoid() * (1 if shape.sigmoid else z))
            out.append(torch.cat(token))
            if (row := int(runs.rows[t])) >= 0:
                states.tail[row], states.memory[row] = tail, memory
    return torch.stack(out)


def additive_token(
    taken: Tensor, inputs: DeltaInputs, t: int, weights: DeltaWeights, memory: Tensor, shape: DeltaShape
) -> Tensor:
    """A token after the convolution [Hk, C] -> [Hv Dv]; memory [Hv, Dk, Dv] changes."""
    found = []
    assert weights.skip is not None
    for head in range(shape.key_heads):
        q, k, values = taken[head].split((shape.key, shape.key, shape.shared * shape.value))
        of_head = []
        for place in range(shape.shared):
            h = head * shape.shared + place
            v = values[place * shape.value : (place + 1) * shape.value]
            width = torch.log1p((inputs.a[t, head, place] + weights.dt_bias[h].double()).exp())
            width = min(max(width, torch.tensor(shape.shortest)), torch.tensor(shape.longest))
            memory[h] = memory[h] * (-weights.a_log[h].double().exp() * width).exp() + torch.outer(k, width * v)
            of_head.append(memory[h].T @ q + weights.skip[h].double() * v)
        y = torch.cat(of_head)
        if shape.taps:
            y = y * inputs.z[t, head] * inputs.z[t, head].sigmoid()
            y = y / (y.square().mean() + weights.eps).sqrt()
        found.append(y)
    return torch.cat(found) * (weights.norm.double() if shape.taps else 1)


def kernel(name: str) -> Any:
    (row,) = (row for row in tables.DELTA if row.name == name)
    return Choice("delta", row, "").build()


def compare(name: str, shape: DeltaShape, runs: StateRuns, num_rows: int, dtype: torch.dtype, bound: float) -> None:
    inputs, weights, states = delta_inputs(shape, runs.num_tokens, num_rows, dtype)
    expected = wide(states)
    wanted = recurrence(wide(inputs), weights, expected, runs, shape)
    got = kernel(name).run(inputs, weights, states, runs, shape)
    assert got.dtype == dtype
    for found, right in ((got, wanted), (states.tail, expected.tail), (states.memory, expected.memory)):
        assert torch.linalg.vector_norm(found.double() - right) <= bound * torch.linalg.vector_norm(right)


def runs_with_stores() -> tuple[StateRuns, int]:
    """A prompt whose intermediate states are stored in other rows, a decode, and drafts that each store a state."""
    lens, reads, stored = [150, 1, 4], [3, 0, 5], [(40, 64, 150), (1,), (1, 2, 3, 4)]
    rows = torch.full((sum(lens),), -1, dtype=torch.int64)
    starts = torch.tensor([0, 150, 151, 155], dtype=torch.int32)
    for offset, row in ((39, 7), (63, 8), (149, 3), (150, 0), (151, 9), (152, 10), (153, 11), (154, 12)):
        rows[offset] = row
    return StateRuns(lens, starts, torch.tensor(reads), stored, rows), 13


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_and_stores(name: str, shape: DeltaShape) -> None:
    compare(name, shape, *runs_with_stores(), torch.float32, 2e-5)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decodes(name: str, dtype: torch.dtype, shape: DeltaShape) -> None:
    runs = StateRuns.plain([1, 1, 1], torch.tensor([4, 0, 2]))
    assert runs.is_decode
    compare(name, shape, runs, 5, dtype, 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("shape", SHAPES[::2], ids=str)
def test_a_run_does_not_depend_on_others_or_on_its_cut(name: str, shape: DeltaShape) -> None:
    inputs, weights, states = delta_inputs(shape, 90, 4, torch.float32)
    whole = DeltaStates(*(x.clone() for x in states))
    together = kernel(name).run(inputs, weights, whole, StateRuns.plain([70, 20], torch.tensor([2, 0])), shape)
    pieces = []
    for begin, end, row in ((0, 33, 2), (33, 34, 2), (34, 70, 2), (70, 90, 0)):
        part = DeltaInputs(*(x[begin:end] for x in inputs))
        runs = StateRuns.plain([end - begin], torch.tensor([row]))
        pieces.append(kernel(name).run(part, weights, states, runs, shape))
    # sums of up to 70 tokens in another order: a rounding of 2^-24 of the largest value each, and of others that cancel
    for found, want in ((torch.cat(pieces), together), (states.memory, whole.memory)):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5 * float(want.abs().max()))
    assert torch.equal(states.tail, whole.tail)
