"""Qwen3.8-Flash-Next against transformers beyond the indexer's budget, in every form of a step; config.json, headers,
and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from tests.models import sparse, stepper
from tests.models.byte_tokenizer import EOS
from tests.models.checkpoints import GATED_STREAMS, make_checkpoint
from tests.models.rows import all_rows
from tests.models.test_parity import assert_close, whole

Made = tuple[Path, list[int], Tensor]
every_row = pytest.mark.parametrize("row", all_rows())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """A checkpoint, a prompt with clear selections, and transformers' logits for it, by fields of config.json."""
    cached: dict[str, Made] = {}

    def make(**fields: Any) -> Made:
        key = repr(fields)
        if key not in cached:
            path = make_checkpoint(GATED_STREAMS, tmp_path_factory.mktemp("qwen"), 3, tokenizer=False, **fields)
            cached[key] = (path, *expected(path))
        return cached[key]

    return make


@torch.no_grad()
def expected(path: Path) -> tuple[list[int], Tensor]:
    """The prompt has ends of texts, over which no n-gram reaches."""
    model = sparse.load(path)

    def draw() -> tuple[list[int], Tensor]:
        tokens = torch.randint(0, 256, (sparse.PROMPT_LENGTH,))
        tokens[torch.randint(0, sparse.PROMPT_LENGTH, (5,))] = EOS
        return tokens.tolist(), model(tokens.unsqueeze(0)).logits[0]

    return sparse.clear_draw(draw, 5e-6)  # prompts with larger distances are rare: many pools are scored


@every_row
def test_logits_equal_transformers(made: Callable[..., Made], row: str) -> None:
    """A whole prompt; chunks below and beyond the budget that end within a pool, decodes, several tokens of a
    decode."""
    path, tokens, want = made()
    assert_close(whole(stepper.load(path, row, page_size=4), tokens), want)
    model = stepper.load(path, row, seed=1, page_size=8)
    assert_close(sparse.in_parts(model, tokens), want)


@every_row
def test_mixed_batches(made: Callable[..., Made], row: str) -> None:
    """Sequences below and beyond the budget in one step, decodes and prompts."""
    path, tokens, want = made()
    model = stepper.load(path, row, seed=2, page_size=4)
    for got in model.run(tokens, sparse.MIXED_STEPS):
        assert_close(got, want[: len(got)])
