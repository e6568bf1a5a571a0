"""Tokens and log-probabilities of whole engines equal transformers': a part of docs/parity.md."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.models.family_parity import IMAGE_KINDS, run_family


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("deepseek_v4", "chunked"),
        ("deepseek_v41", "chunked"),
        ("deepseek_v41", "n-gram drafts"),
        ("deepseek_v41_fp4", "tp 2"),
        ("deepseek_v41_fp4", "DSpark drafts"),
        ("qwen3_moe", "chunked"),
        ("minimax_m2", "chunked"),
        ("minimax_m3", "chunked"),
        ("minimax_m3", "MTP drafts"),
        ("mimo_v2_flash", "chunked"),
        ("gpt_oss", "chunked"),
        ("glm4_moe", "MTP drafts"),
        ("qwen3_next", "chunked"),
        ("kimi_linear", "chunked"),
        ("kimi_linear", "n-gram drafts"),
        ("glm5_next", "cached"),
        ("glm5_next", "chunked"),
        ("glm5_next", "n-gram drafts"),
        ("glm5_next", "MTP drafts"),
        ("qwen4_exp", "cached"),
        ("qwen4_exp", "chunked"),
        ("qwen4_exp", "n-gram drafts"),
        ("kimi_k3", "cached"),
        ("kimi_k3", "n-gram drafts"),
        ("bailing_hybrid", "cached"),
        ("bailing_hybrid", "MTP drafts"),
        ("glm4_moe_lite", "MTP drafts"),
        ("kimi_k25", "chunked"),
        ("qwen3_5", "chunked"),
        ("qwen3_5_moe", "MTP drafts"),
        ("qwen3_vl_moe", "chunked"),
        ("hunyuan_v1_moe", "chunked"),
        ("mistral4", "chunked"),
        ("hy_v3", "MTP drafts"),
        ("ernie4_5_moe", "MTP drafts"),
    ],
)
def test_tokens_equal_transformers(kind: str, form: str, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    if kind in (*IMAGE_KINDS, "kimi_k25", "minimax_m3", "qwen4_exp"):
        pytest.importorskip("PIL", reason="images need pillow: pip install '.[vision]'")
    for result in run_family(kind, tmp_path, seed, [form], count=6, longest=150).values():
        assert result.tokens and not result.wrong and result.error < 3e-4, (kind, form, seed, result)
