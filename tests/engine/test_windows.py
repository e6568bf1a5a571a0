"""The whole engine over models with sliding windows: tokens and log-probabilities equal transformers' far beyond the
window, while the pool of windowed layers is smaller than the contexts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.harness import Answer, InProcessEngine, Scripted
from tests.engine.test_greedy_parity import NUM_TOKENS, check_greedy
from tests.models.checkpoints import make_checkpoint

ALTERNATING = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all layers": ("mistral", {"sliding_window": 24}),
    "alternating": ("qwen3", {**ALTERNATING, "sliding_window": 9}),
    "one token": ("mixtral", {"sliding_window": 1}),
}
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages": {"page_size": 4, "enable_mixed_chunk": True},
    "ngram": NGRAM,
    "unfused": {"attention_backend": "torch_native", "disable_overlap_schedule": True},
}
FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_total_tokens": 700, "max_running_requests": 8, "chunked_prefill_size": 32,
}  # fmt: skip
TOLERANCE = 1e-4


def make_script(rng: random.Random, count: int, max_new: int = NUM_TOKENS) -> list[Scripted]:
    """Shared prefixes, repetitive texts, and log-probabilities of all tokens for some requests."""
    shared, phrase = ([rng.randrange(250) for _ in range(length)] for length in (70, 6))
    return [
        Scripted(
            rid=f"r{i}-",
            prompt_ids=shared[: rng.choice([0, 30, 70])] + phrase * rng.choice([1, 5]) + [rng.randrange(250)],
            max_new_tokens=max_new,
            arrives=rng.randrange(40),
            sampling={"temperature": 0.0, "ignore_eos": True},
            logprob=i % 2 == 0,
            logprob_start=0 if i % 4 == 0 else None,
        )
        for i in range(count)
    ]


def load(path: Path) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def check(model: torch.nn.Module, item: Scripted, answer: Answer, where: str) -> None:
    check_greedy(model, item.prompt_ids, answer.token_ids, where)
    if not item.logprob:
        return
    tokens = item.prompt_ids + answer.token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert len(answer.logprobs) == len(answer.token_ids), where
    got = [entry.logprob for entry in answer.logprobs]
    assert got == pytest.approx(wanted[len(item.prompt_ids) - 1 :], abs=TOLERANCE), where
    if item.logprob_start is not None:
        inputs = [entry.logprob for entry in answer.prompt_logprobs]
        assert inputs[1:] == pytest.approx(wanted[: len(item.prompt_ids) - 1], abs=TOLERANCE), where


def pool_rows(engine: InProcessEngine) -> list[int]:
    """Tokens of each layer's KV tensors."""
    return [len(layer[0]) for layer in engine.worker.runner.kv_pool.layers]


def check_bounded(engine: InProcessEngine, windowed: Sequence[int]) -> None:
    """The windowed layers' tensors have the size in the ledger, which is smaller than that of the others."""
    config, page = engine.config, engine.config.page_size
    assert 0 < config.num_window_slots < config.max_total_num_tokens
    sizes = [
        config.num_window_slots if i in windowed else config.max_total_num_tokens for i in range(len(pool_rows(engine)))
    ]
    assert pool_rows(engine) == [size + page for size in sizes]
    ledger = config.ledger
    assert engine.worker.info.kv_bytes == ledger.kv_bytes + ledger.bytes_of("KV of windows")


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_answers_equal_transformers(name: str, form: str, tmp_path: Path) -> None:
    """Chunked prompts and retractions (the pool is small), with and without the radix cache."""
    kind, fields = MODELS[name]
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    path = make_checkpoint(kind, tmp_path / "model", seed=seed, **fields)
    engine = InProcessEngine(path, tmp_path / "status", **FLAGS, **FORMS[form])
    model = load(path)
    try:
        check_bounded(engine, engine.config.model.windowed_layers)
        for disable in (False, True):
            script = make_script(rng, 10)
            answers = engine.run(script, disable_radix_cache=disable)
            for item in script:
                check(model, item, answers[item.rid], f"{name} {form} seed {seed} {item.rid} no radix cache {disable}")
            assert disable or sum(answer.cached_tokens for answer in answers.values()) > 0
    finally:
        engine.close()


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "flags", [{}, {"page_size": 4, "disable_radix_cache": True}, NGRAM, {"disable_overlap_schedule": True}]
)
def test_a_window_pool_with_room_for_few_requests(flags: dict[str, Any], tmp_path: Path) -> None:
    """Requests wait for free slots in the window pool, or are retracted."""
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    fields = {**ALTERNATING, "sliding_window": 60}
    path = make_checkpoint("qwen3", tmp_path / "model", seed=seed, **fields)
    shape = {
        "max_total_tokens": 1600,
        "chunked_prefill_size": 16,
        "max_running_requests": 8,
        "swa_full_tokens_ratio": 0.15,
    }
    engine = InProcessEngine(path, tmp_path / "status", **FLAGS | shape | flags)
    model = load(path)
    try:
        assert engine.config.num_window_slots < 8 * 63
        script = make_script(rng, 12)
        answers = engine.run(script)
        for item in script:
            check(model, item, answers[item.rid], f"seed {seed} {item.rid} {flags}")
    finally:
        engine.close()


@pytest.mark.parametrize(
    "flags",
    [
        {"kv_cache_dtype": "fp8_e4m3"},
        pytest.param({"kv_cache_dtype": "fp8_e5m2", **NGRAM}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"enable_torch_compile": True, "torch_compile_max_bs": 2, "attention_backend": "torch"},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_tokens_are_those_of_one_pool_for_all_layers(flags: dict[str, Any], tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    path = make_checkpoint("qwen3", tmp_path / "model", seed=seed, **ALTERNATING, sliding_window=9)
    script = make_script(random.Random(seed), 6, max_new=24)
    found = []
    for one_pool in (True, False):
        engine = InProcessEngine(path, tmp_path / "status", **FLAGS | flags, disable_hybrid_swa_memory=one_pool)
        try:
            assert (engine.config.num_window_slots == 0) == one_pool
            found.append({rid: answer.token_ids for rid, answer in engine.run(script).items()})
        finally:
            engine.close()
    assert found[0] == found[1]


def test_long_conversations_in_a_small_pool(tmp_path: Path) -> None:
    """Turns of growing conversations with 700 tokens in total: a pool of 120 tokens holds their windows."""
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    path = make_checkpoint("mistral", tmp_path / "model", seed=seed, sliding_window=16)
    flags = FLAGS | {"max_total_tokens": 2000, "max_running_requests": 2, "chunked_prefill_size": 16}
    engine = InProcessEngine(path, tmp_path / "status", **flags)
    model = load(path)
    try:
        assert engine.config.num_window_slots < 120
        texts: list[list[int]] = [[rng.randrange(250) for _ in range(40)] for _ in range(3)]
        for turn in range(4):
            script = [
                Scripted(
                    f"t{turn}-{i}-",
                    list(text),
                    NUM_TOKENS,
                    sampling={"temperature": 0.0, "ignore_eos": True},
                    logprob=True,
                )
                for i, text in enumerate(texts)
            ]
            answers = engine.run(script)
            for text, item in zip(texts, script):
                check(model, item, answers[item.rid], f"seed {seed} {item.rid}")
                text += answers[item.rid].token_ids[:-1] + [rng.randrange(250) for _ in range(3)]
    finally:
        engine.close()


def test_the_pool_of_windows_does_not_grow_with_the_context(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model", **ALTERNATING, sliding_window=9)
    sizes = []
    for context in (250, 500):
        flags = FLAGS | {"max_total_tokens": 2 * context, "max_running_requests": 4, "context_length": context}
        engine = InProcessEngine(path, tmp_path / "status", **flags)
        sizes.append(pool_rows(engine))
        engine.close()
    (full, windowed, _), (twice, same, _) = sizes
    assert (twice, same) == (2 * full - 1, windowed)
    assert windowed < full / 2
