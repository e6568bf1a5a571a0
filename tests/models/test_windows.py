"""Models with sliding windows: logits equal those of transformers beyond the window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models import stepper
from tests.models.conftest import Oracle
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_parity import assert_close

MakeOracle = Callable[..., Oracle]
ALTERNATING = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("mistral", {"sliding_window": 8}, 1),
    ("mistral", {"sliding_window": 33}, 1),
    ("mixtral", {"sliding_window": 17}, 1),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 2),
    ("qwen3", {**ALTERNATING, "sliding_window": 5}, 2),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}, 1),
]


@pytest.mark.parametrize("row", all_rows())
@pytest.mark.parametrize(("kind", "fields", "groups"), CASES)
def test_beyond_the_window(oracle: MakeOracle, kind: str, fields: dict[str, Any], groups: int, row: str) -> None:
    want = oracle(kind, **fields)
    model, tokens = stepper.load(want.path, row, seed=1), want.tokens
    assert len(model.config.cache_groups) == groups
    first = model.step([Chunk(0, tokens[:37], False)])
    second = model.step([Chunk(1, tokens[:1], False), Chunk(0, tokens[37:60], False)])
    got = [first[0], second[1]]
    got.append(model.step([Chunk(0, tokens[60:61], True), Chunk(2, tokens[:9], False)])[0])
    got += [model.step([Chunk(0, [token], True)])[0] for token in tokens[61:80]]
    got += [model.step([Chunk(0, tokens[80:84], True)])[0], model.step([Chunk(0, tokens[84:], False)])[0]]
    assert_close(torch.cat(got), want.logits)


def test_the_window_matters(oracle: MakeOracle) -> None:
    """The same weights without the window give other logits beyond it, and equal logits within it."""
    windowed, full = oracle("mistral", sliding_window=8), oracle("mistral", sliding_window=None)
    assert_close(windowed.logits[:8], full.logits[:8])
    assert (windowed.logits[8:] - full.logits[8:]).norm(dim=-1).min() > 1e-3 * full.logits.norm(dim=-1).mean()
