"""Tokens and log-probabilities of whole engines equal transformers': a part of docs/parity.md."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.family_parity import IMAGE_KINDS, compare, run_family
from tests.models.parity_families import Family, Pixels, Prompt


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
        ("step3p7", "chunked"),
        ("laguna", "chunked"),
        ("llama4", "chunked"),
        ("cohere2_vision", "cached"),
        ("gemma3_vision", "cached"),
        ("afmoe", "chunked"),
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
        ("qwen4_exp", "MTP drafts"),
        ("kimi_k3", "cached"),
        ("kimi_k3", "n-gram drafts"),
        ("nemotron_h", "cached"),
        ("nemotron_h", "n-gram drafts"),
        ("bailing_hybrid", "cached"),
        ("bailing_hybrid", "MTP drafts"),
        ("ling_v2_5", "cached"),
        ("ling_v2_5", "MTP drafts"),
        ("glm4_moe_lite", "MTP drafts"),
        ("kimi_k25", "chunked"),
        ("qwen3_5", "chunked"),
        ("qwen3_5_moe", "MTP drafts"),
        ("qwen3_vl_moe", "chunked"),
        ("glm4v", "cached"),
        ("glm4v_moe", "chunked"),
        ("hunyuan_v1_moe", "chunked"),
        ("mistral4", "chunked"),
        ("mistral_large3", "cached"),
        ("mistral_large4", "chunked"),
        ("hy_v3", "MTP drafts"),
        ("ernie4_5_moe", "MTP drafts"),
    ],
)
def test_tokens_equal_transformers(kind: str, form: str, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    if kind in (
        *IMAGE_KINDS,
        "gemma3_vision",
        "cohere2_vision",
        "kimi_k25",
        "minimax_m3",
        "qwen4_exp",
        "mistral_large3",
        "mistral_large4",
    ):
        pytest.importorskip("PIL", reason="images need pillow: pip install -e '.[vision]'")
    for result in run_family(kind, tmp_path, seed, [form], count=6, longest=150).values():
        assert result.tokens and not result.wrong and result.error < 3e-4, (kind, form, seed, result)


def test_only_tokens_that_rounding_decides_are_left_out() -> None:
    """An oracle with a selection in each token, which is a near tie in token 1 alone."""
    embeddings = torch.tensor([[2.0, 0.5], [1.0, 0.7], [0.1, 0.9]], dtype=torch.float64)

    def oracle(ids: list[int], images: list[Pixels]) -> Tensor:
        score, value = embeddings[ids].unbind(1)
        best = score >= 1.0
        return torch.stack((value, best * 1.0, ~best * 1.0), 1)

    family = Family(Path(), oracle, lambda *_: [], embeddings)

    def answer(ids: list[int], wrong: int) -> tuple[list[int], list[float]]:
        """Greedy, with the other selection for token `wrong`."""
        logits = oracle(ids, [])
        logits[:, 1:] = torch.where(
            torch.tensor([id == wrong for id in ids])[:, None], logits[:, [2, 1]], logits[:, 1:]
        )
        return logits.argmax(-1).tolist(), logits.log_softmax(-1).amax(-1).tolist()

    asked = Prompt([0], [0])
    tokens = [1, 1]
    assert answer([0, 1], 9)[0] == tokens
    clear = compare(family, [asked], [answer([0, 1], 9)])
    assert (clear.tokens, clear.wrong, clear.unsure) == (2, 0, 0)
    tie = compare(family, [asked], [answer([0, 1], 1)])
    assert (tie.tokens, tie.wrong, tie.unsure) == (1, 0, 1)
    defect = compare(family, [asked], [answer([0, 1], 0)])
    assert defect.wrong
