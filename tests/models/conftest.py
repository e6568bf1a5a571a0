"""Checkpoints and their oracles, created once per session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import sparse
from tests.models.checkpoints import SPARSE_KINDS, dequantized_copy, make_checkpoint

PROMPT_LENGTH = 90  # beyond YaRN's original 64, so that its bands matter


@dataclass(frozen=True)
class Oracle:
    """A checkpoint, a random prompt, and transformers' logits for it."""

    path: Path
    tokens: list[int]
    logits: Tensor  # [T, V] float32


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Oracle]:
    """oracle(kind, seed=..., **checkpoint options) -> Oracle, cached by its arguments."""
    made: dict[str, Oracle] = {}

    def make(kind: str, seed: int = 0, **options: Any) -> Oracle:
        key = repr((kind, seed, sorted(options.items())))
        if key not in made:
            path = make_checkpoint(kind, tmp_path_factory.mktemp(kind), seed=seed, **options)
            plain = dequantized_copy(path, tmp_path_factory.mktemp(kind)) if options.get("fp8") else path
            reference = sparse.reference_logits if kind in SPARSE_KINDS else reference_logits
            made[key] = Oracle(path, *reference(plain, seed))
        return made[key]

    return make


def reference_logits(path: Path, seed: int) -> tuple[list[int], Tensor]:
    """A random prompt with clear choices of experts, and the logits of transformers in float32 with eager attention."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(seed + 7)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    def draw() -> tuple[list[int], Tensor]:
        ids = torch.randint(0, 256, (1, PROMPT_LENGTH), generator=generator)
        return ids[0].tolist(), model(ids).logits[0]

    with torch.no_grad():
        return sparse.clear_draw(draw, 5e-6, needed=False)  # one of fifty prompts has less
