"""An FP8 KV cache of models with sliding windows: log-probabilities equal transformers' with keys and values rounded to
the cache's format, far beyond the window, while the pool of windowed layers is smaller than the contexts."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.harness import InProcessEngine
from tests.engine.test_windows import ALTERNATING, FLAGS, NGRAM, check_bounded, load, make_script
from tests.models.checkpoints import make_checkpoint

MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 24},
    "qwen3": {**ALTERNATING, "sliding_window": 9},
    "mimo_v2_flash": {"n_routed_experts": 2, "num_experts_per_tok": 2},
    "afmoe": {"num_experts": 2, "num_experts_per_tok": 2},
    "cohere2": {},
    "exaone4": {},
    "flint": {"num_experts": 2, "num_experts_per_tok": 2},
    "gemma2": {},
    "gemma3": {},
    "gemma4": {"num_experts": 2, "top_k_experts": 2},
    "llama4": {"num_local_experts": 1},
    "laguna": {"num_experts": 2, "num_experts_per_tok": 2},
    "step3p7": {"moe_num_experts": 2, "moe_top_k": 2},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 2},  # no router whose choices rounded rows change
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages": {"page_size": 4, "enable_mixed_chunk": True},
    "drafts": NGRAM,
    "torch": {"attention_backend": "torch_native", "disable_overlap_schedule": True},
    "host tier": {"enable_hierarchical_cache": True, "hicache_size": 1},
}
LAST_BITS = 1e-6
"""Difference of the engine's keys and values from transformers', as a share of a row's largest number."""
EXACT = 1e-3
"""Largest error of a log-probability without a number rounded the other way, or with small ones only."""


class RoundedRows:
    """transformers' models of a kind attend to keys and values as a cache of the format has them.

    The engine's numbers differ from transformers' in their last bits, and one between two numbers of the format may be
    rounded to either: a step of up to a quarter, which all later tokens see if it is in a shared prefix.

    Attributes:
        ties: numbers that may be rounded to either, of the last forward pass: (tensor, index).
        other: those that are rounded the other way.
    """

    def __init__(self, kind: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ties: list[tuple[int, int]] = []
        self.other: tuple[tuple[int, int], ...] = ()
        self._tensors = 0
        self._e4m3 = kv_dtype == "fp8_e4m3"
        modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        attend = modeling.eager_attention_forward

        def attend_to_rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            return attend(module, query, self._rounded(key), self._rounded(value), *args, **kwargs)

        monkeypatch.setattr(modeling, "eager_attention_forward", attend_to_rounded)

    def begin(self, other: tuple[tuple[int, int], ...] = ()) -> None:
        """Before each forward pass."""
        self.ties, self.other, self._tensors = [], other, 0

    def _rounded(self, rows: Tensor) -> Tensor:
        largest = rows.abs().amax(-1, keepdim=True)
        scale = largest / 448 if self._e4m3 else 1.0
        dtype = torch.float8_e4m3fn if self._e4m3 else torch.float8_e5m2
        low, out, high = (((rows + d * largest) / scale).to(dtype).float() * scale for d in (-LAST_BITS, 0, LAST_BITS))
        numbers, either = out.flatten(), (low + high - out).flatten()
        for index in (low != high).flatten().nonzero()[:, 0].tolist():
            self.ties.append((self._tensors, index))
            if self.ties[-1] in self.other:
                numbers[index] = either[index]
        self._tensors += 1
        return numbers.view_as(rows)


def log_probabilities(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    """Of each token but the first, given those before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def least_errors(model: torch.nn.Module, rows: RoundedRows, tokens: list[int], got: Tensor) -> Tensor:
    """Errors of the last tokens, with the numbers that may be rounded to either as they fit best."""

    def errors(other: tuple[tuple[int, int], ...]) -> Tensor:
        rows.begin(other)
        return (got - log_probabilities(model, tokens)[-len(got) :]).abs()

    best = errors(())
    while best.max() > EXACT:
        chosen, ties = rows.other, rows.ties
        tries = {tie: errors((*chosen, tie)) for tie in ties if tie not in chosen}
        nearest = min(tries, key=lambda tie: float(tries[tie].sum()), default=None)
        if nearest is None or tries[nearest].sum() >= best.sum():
            break
        best = errors((*chosen, nearest))
    return best


@pytest.mark.drawn(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("kind", MODELS)
def test_answers_are_those_of_rounded_rows(
    kind: str, kv_dtype: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(2**31)
    path = make_checkpoint(kind, tmp_path / "model", seed=seed, **MODELS[kind])
    engine = InProcessEngine(path, tmp_path / "status", kv_cache_dtype=kv_dtype, **FLAGS, **FORMS[form])
    try:
        if engine.config.num_window_slots:  # the host tier of a model with windows in all layers keeps all tokens
            check_bounded(engine, engine.config.model.windowed_layers)
        script = make_script(random.Random(seed), 10)
        answers = engine.run(script)
    finally:
        engine.close()
    asked = [item for item in script if item.logprob]
    texts = [item.prompt_ids + answers[item.rid].token_ids for item in asked]
    got = [torch.tensor([entry.logprob for entry in answers[item.rid].logprobs]) for item in asked]
    check_rounded(kind, kv_dtype, path, texts, got, monkeypatch)


def check_rounded(
    kind: str, kv_dtype: str, path: Path, texts: list[list[int]], got: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`got`: log-probabilities of the last tokens of each text, from a cache in `kv_dtype`."""
    model = load(path)
    unrounded = [(found - log_probabilities(model, text)[-len(found) :]).abs() for text, found in zip(texts, got)]
    rows = RoundedRows(kind, kv_dtype, monkeypatch)
    errors = torch.cat([least_errors(model, rows, text, found) for text, found in zip(texts, got, strict=True)])
    assert errors.quantile(0.75) < torch.cat(unrounded).median() / 100
    assert errors.max() < torch.cat(unrounded).median() / 2, errors
