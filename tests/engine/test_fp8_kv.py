"""The whole engine with an FP8 KV cache: the embedded model's answers are correct, rows are smaller, invariance
holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_engine.demo import CHECKPOINT_DIR
from tests.engine.harness import InProcessEngine, Scripted
from tests.models.checkpoints import make_checkpoint

FORMATS = [(model, kv_dtype) for model in ("deepseek_v3", "qwen3") for kv_dtype in ("fp8_e4m3", "fp8_e5m2")]
FORMATS.append(("deepseek_v3", "fp8_per_tensor"))
NEXTN = {
    "speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 5,
}  # fmt: skip
"""A tree: its accepted tokens move to other slots."""

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome"}


@pytest.mark.parametrize(
    ("kv_dtype", "kernels"),
    [("fp8_e4m3", "cpu"), ("fp8_e5m2", "cpu"), ("fp8_e4m3", "torch"), ("fp8_per_tensor", "cpu")],
)
def test_capitals(kv_dtype: str, kernels: str, tmp_path: Path) -> None:
    engine = InProcessEngine(
        CHECKPOINT_DIR, tmp_path / "status", kv_cache_dtype=kv_dtype, max_total_tokens=4096, attention_backend=kernels
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT_DIR)
    script = []
    for country in CAPITALS:
        question = [{"role": "user", "content": f"What is the capital of {country}?"}]
        text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        script.append(Scripted(f"{country}-", prompt, max_new_tokens=12))
    try:
        answers = engine.run(script)
    finally:
        engine.close()
    for country, capital in CAPITALS.items():
        text = tokenizer.decode(answers[f"{country}-"].token_ids)
        assert capital in text, text


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield make_checkpoint(request.param, tmp_path_factory.mktemp(request.param) / "model", seed=random.randrange(2**31))


def _script(rng: random.Random) -> list[Scripted]:
    shared = [rng.randrange(250) for _ in range(40)]
    return [
        Scripted(
            rid=f"r{i}-",
            prompt_ids=shared[: rng.choice([0, 16, 40])] + [rng.randrange(250) for _ in range(rng.choice([1, 9, 90]))],
            max_new_tokens=24,
            arrives=rng.randrange(20),
            sampling={"temperature": 0.0, "ignore_eos": True},
            logprob=True,
        )
        for i in range(10)
    ]


@pytest.mark.parametrize(("checkpoint", "kv_dtype"), FORMATS, indirect=["checkpoint"])
def test_outputs_do_not_depend_on_step_boundaries_or_drafts(checkpoint: Path, tmp_path: Path, kv_dtype: str) -> None:
    """Bit for bit, in float32 with one form of attention: a different last bit may change the rounding of a row to
    eight bits."""
    seed = random.randrange(2**31)
    script = _script(random.Random(seed))
    flags = {
        "dtype": "float32", "kv_cache_dtype": kv_dtype, "max_total_tokens": 512, "max_running_requests": 8,
        "chunked_prefill_size": 64, "enable_deterministic_inference": True,
    }  # fmt: skip
    engine = InProcessEngine(checkpoint, tmp_path / "status", **flags)
    try:
        together = engine.run(script)
        apart = engine.run(script, chunked_prefill_size=17, max_rows=2, disable_radix_cache=True)
        assert engine.worker.info.kv_bytes == engine.config.ledger.bytes_per_token * 513
    finally:
        engine.close()
    assert any(answer.cached_tokens for answer in together.values())
    drafts = NEXTN if engine.config.model.num_nextn_predict_layers else {"speculative_algorithm": "NGRAM"}
    engine = InProcessEngine(checkpoint, tmp_path / "status2", **flags, **drafts)
    try:
        drafted = engine.run(script)
    finally:
        engine.close()
    for item in script:
        want = apart[item.rid]
        assert together[item.rid].token_ids == want.token_ids, f"seed {seed} {item.rid}"
        assert together[item.rid].logprobs == want.logprobs, f"seed {seed} {item.rid}"
        assert drafted[item.rid].token_ids == want.token_ids, f"seed {seed} {item.rid} with drafts"


def test_scales_of_a_checkpoint_are_noted(tmp_path: Path) -> None:
    """A checkpoint with k_scale and v_scale, as quantization tools write them, gives the tokens of one without."""
    path = make_checkpoint("deepseek_v3", tmp_path / "model", seed=random.randrange(2**31))
    script = [Scripted("r", [5, 6, 7], 8, 0, sampling={"temperature": 0.0, "ignore_eos": True})]
    flags = {"dtype": "float32", "kv_cache_dtype": "fp8_per_tensor", "max_total_tokens": 64}
    found = []
    for number in range(2):
        engine = InProcessEngine(path, tmp_path / f"status{number}", **flags)
        try:
            found.append(engine.run(script)["r"].token_ids)
            notes = [note for note in engine.config.notes if "k_scale" in note]
        finally:
            engine.close()
        assert len(notes) == number
        file = path / "model.safetensors"
        names = [f"model.layers.0.self_attn.{name}" for name in ("k_proj.k_scale", "v_proj.v_scale")]
        save_file(load_file(file) | {name: torch.tensor(0.5) for name in names}, file, metadata={"format": "pt"})
    assert found[0] == found[1]
