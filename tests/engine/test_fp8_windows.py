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
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 2},  # no router whose choices rounded rows change
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages": {"page_size": 4, "enable_mixed_chunk": True},
    "drafts": NGRAM,
    "torch": {"attention_backend": "torch_native", "disable_overlap_schedule": True},
    "host tier": {"enable_hierarchical_cache": True, "hicache_size": 1},
}


def round_rows(kind: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' models of this kind attend to keys and values as a cache of the format has them."""
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    attend, e4m3 = modeling.eager_attention_forward, kv_dtype == "fp8_e4m3"

    def rounded(rows: Tensor) -> Tensor:
        if not e4m3:
            return rows.to(torch.float8_e5m2).float()
        scale = rows.abs().amax(-1, keepdim=True) / 448
        return (rows / scale).to(torch.float8_e4m3fn).float() * scale

    def attend_to_rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return attend(module, query, rounded(key), rounded(value), *args, **kwargs)

    monkeypatch.setattr(modeling, "eager_attention_forward", attend_to_rounded)


@pytest.mark.drawn(4)
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
    errors = {}
    for rounds in (False, True):
        if rounds:
            round_rows(kind, kv_dtype, monkeypatch)
        model, found = load(path), []
        for item in script:
            tokens = item.prompt_ids + answers[item.rid].token_ids
            with torch.inference_mode():
                logits = model(torch.tensor([tokens])).logits[0]
            wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
            got = torch.tensor([entry.logprob for entry in answers[item.rid].logprobs])
            if item.logprob:
                found.append((got - wanted[len(item.prompt_ids) - 1 :]).abs())
        errors[rounds] = torch.cat(found)
    # a number between two of the format may be rounded to either, and moves its request's log-probabilities a little
    assert errors[True].quantile(0.75) < errors[False].median() / 100
    assert errors[True].max() < 0.1, errors[True]
