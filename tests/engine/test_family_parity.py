"""Tokens and log-probabilities of whole engines equal transformers': a part of docs/parity.md."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.models.family_parity import run_family


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("qwen3_moe", "chunked"),
        ("minimax_m2", "chunked"),
        ("gpt_oss", "chunked"),
        ("glm4_moe", "MTP drafts"),
        ("qwen3_next", "chunked"),
    ],
)
def test_tokens_equal_transformers(kind: str, form: str, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    for result in run_family(kind, tmp_path, seed, [form], count=6, longest=150).values():
        assert result.tokens and not result.wrong and result.error < 1e-4, (kind, form, seed, result)
