"""Packed masks of rows and draft positions, static and late, against Python sets, in passes of any size."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from moe_engine.types import NewRow, SamplingParams
from moe_engine.types.token_masks import LaunchedStep, StepMasks, words_of
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling import token_masker
from moe_engine.worker.sampling.token_masker import TokenMasker

MAX_ROWS = 9


def packed(allowed: set[int], vocab_size: int) -> bytes:
    words = np.zeros(words_of(vocab_size), dtype="<u4")
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.tobytes()


@pytest.mark.parametrize("vocab_size", [5, 32, 70, 321])
@pytest.mark.parametrize("scratch", [1, token_masker.EDIT_BYTES])
@pytest.mark.parametrize("statics", [True, False])
def test_masks_of_rows_and_positions(
    vocab_size: int, scratch: int, statics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without static masks the late masks are used directly if they have the order of the rows, prepared or not."""
    monkeypatch.setattr(token_masker, "EDIT_BYTES", scratch)
    monkeypatch.setattr(token_masker, "PREPARED_BYTES", random.choice([scratch // 2, 1 << 24]))
    pick = random.Random(random.getrandbits(64))
    vocabulary = range(vocab_size)
    masker = TokenMasker(MAX_ROWS, vocab_size, DeviceStream("cpu"))
    static: dict[int, set[int]] = {}
    late = set()
    for row in range(1, MAX_ROWS):
        allowed = tuple(pick.sample(vocabulary, pick.randint(2, vocab_size))) if statics and row % 2 else ()
        banned = pick.randrange(vocab_size) if statics and row % 3 else None
        words = ((banned,),) if banned is not None else ()
        if row % 4 < 2:
            late.add(row)
            words += ((0, 1),)
        if allowed or words:
            sampling = SamplingParams(allowed_token_ids=allowed, bad_word_ids=words)
            masker.enter(NewRow(row, "r", [1], 1, [], sampling, 0, frozenset()))
        static[row] = set(allowed or vocabulary) - {banned}
    rows = pick.sample(range(MAX_ROWS), MAX_ROWS)
    most = pick.choice([0, 1, 4])  # 0: all requests have ended
    counts = [pick.randint(0, most) if row in late else 1 for row in rows]
    positions = {
        row: [set(pick.sample(vocabulary, vocab_size // 2 + 1)) for _ in range(n)] for row, n in zip(rows, counts)
    }
    masked = [row for row in rows if row in late]
    launched = LaunchedStep(7)
    bits = b"".join(packed(some, vocab_size) for row in masked for some in positions[row])
    masks = StepMasks(7, masked, [len(positions[row]) for row in masked], bits)
    if pick.random() < 0.5:  # as Worker.sample does
        launched.prepared = masker.prepare(masks)
    launched.sample(masks)
    masker.begin(launched)
    lines = [(row, i) for row in rows for i in range(max(1, len(positions[row])))]
    logits = torch.randn(len(lines), vocab_size)
    expected = logits.clone()
    for line, (row, i) in enumerate(lines):
        allowed_here = static.get(row, set(vocabulary))
        if row in late and positions[row]:
            allowed_here = allowed_here & positions[row][i]
        expected[line, [t for t in vocabulary if t not in allowed_here]] = -torch.inf
        if not allowed_here:
            expected[line] = torch.nan
    begin = 0
    while begin < len(lines):
        end = begin + pick.randint(1, 5)
        masker.apply(logits[begin:end], np.array([row for row, _ in lines[begin:end]]))
        begin = end
    assert torch.equal(logits.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert set(masker.errors) == {row for line, (row, _) in enumerate(lines) if expected[line].isnan().any()}


def test_a_masked_row_without_masks_is_an_error() -> None:
    masker = TokenMasker(2, 40, DeviceStream("cpu"))
    masker.enter(NewRow(1, "r", [1], 1, [], SamplingParams(bad_word_ids=((1, 2),)), 0, frozenset()))
    with pytest.raises(ValueError, match="executed without"):
        masker.apply(torch.zeros(1, 40), np.array([1]))
    masker.forget(1)
    masker.apply(torch.zeros(1, 40), np.array([1]))
