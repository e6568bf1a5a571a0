"""Penalties, biases and forbidden ends against a naive computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_engine.types import NewRow, SamplingParams
from moe_engine.worker import logit_edits
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.logit_edits import LogitEdits

VOCAB = 40
EOS = frozenset({3})


def naive(logits: list[float], prompt: list[int], outputs: list[int], p: SamplingParams) -> list[float]:
    out = []
    for token, value in enumerate(logits):
        if token in prompt or token in outputs:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        value -= p.frequency_penalty * outputs.count(token)
        value -= p.presence_penalty * (token in outputs)
        value += sum(v for t, v in p.logit_bias if t == token)
        if len(outputs) < p.min_new_tokens and (token in EOS or token in p.stop_token_ids):
            value = -float("inf")
        out.append(value)
    return out


KINDS = [
    SamplingParams(frequency_penalty=0.7),
    SamplingParams(presence_penalty=-0.4),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.8, frequency_penalty=0.3, presence_penalty=0.2, min_new_tokens=3),
    SamplingParams(logit_bias=((5, 2.0), (6, -100.0))),
    SamplingParams(min_new_tokens=2, stop_token_ids=(7, 8)),
    SamplingParams(),
]


@pytest.mark.parametrize("at_once", [1 << 24, 2 * VOCAB])
def test_against_naive_over_a_random_life(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Rows come, sample, are retracted and re-enter; the device's counts follow."""
    monkeypatch.setattr(logit_edits, "MAX_ELEMENTS", at_once)
    pick = np.random.default_rng(0)
    edits = LogitEdits(12, VOCAB, DeviceStream("cpu"))
    live: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}

    def enter(row: int, p: SamplingParams, prompt: list[int], outputs: list[int]) -> None:
        edits.enter(NewRow(row, "r", prompt + outputs, len(prompt), [], p, 0, EOS))
        live[row] = (p, prompt, outputs)

    for step in range(120):
        row = int(pick.integers(12))
        if row in live and pick.random() < 0.5:
            p, prompt, outputs = live.pop(row)
            edits.forget(row)
            if pick.random() < 0.5:
                enter(row, p, prompt, outputs)
        elif row not in live:
            enter(row, KINDS[step % len(KINDS)], pick.integers(0, VOCAB, 5).tolist(), [])
        rows = pick.permutation(list(live))[: pick.integers(1, len(live) + 1)]
        logits = torch.from_numpy(pick.normal(0, 1, (len(rows), VOCAB)).astype(np.float32))
        before = logits.clone()
        lengths = np.array([len(live[r][1]) + len(live[r][2]) for r in rows])
        edits.apply(logits, rows, lengths)
        tokens = pick.integers(0, VOCAB, len(rows))
        edits.sampled(torch.from_numpy(tokens), rows)
        for i, r in enumerate(rows):
            p, prompt, outputs = live[r]
            expected = naive(before[i].tolist(), prompt, outputs, p)
            assert logits[i].tolist() == pytest.approx(expected, abs=1e-5)
            outputs.append(int(tokens[i]))


def test_a_row_without_wishes_costs_nothing() -> None:
    edits = LogitEdits(4, VOCAB, DeviceStream("cpu"))
    edits.enter(NewRow(1, "r", [1], 1, [], SamplingParams(), 0, EOS))
    assert not edits.active and edits._output_counts.numel() == 0


def test_tables_are_reused() -> None:
    edits = LogitEdits(4, VOCAB, DeviceStream("cpu"))
    for _ in range(50):
        edits.enter(NewRow(1, "r", [1, 2, 2], 1, [], KINDS[0], 0, EOS))
        edits.forget(1)
    assert edits._output_counts.shape[0] == 4 and not edits.active
