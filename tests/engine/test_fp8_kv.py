"""The whole engine with an FP8 KV cache: the embedded model's answers are correct, rows are smaller, invariance
holds."""

from __future__ import annotations

import gc
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_engine.config.args import EngineArgs
from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.errors import ConfigError
from moe_engine.models.layers.attention.mla import MLAAttention
from moe_engine.models.tensors.model import LATENT_SCALES
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.worker.weight_read import ReadArgs
from moe_engine.worker.weight_update import CheckpointArgs
from tests.engine.harness import InProcessEngine, Scripted
from tests.models.checkpoints import make_checkpoint
from tests.models.latent_scales import add_latent_scales
from tests.speculation.eagle_pairs import make_pair

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


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("checkpoint", "kv_dtype"), FORMATS, indirect=["checkpoint"])
def test_outputs_do_not_depend_on_step_boundaries_or_drafts(checkpoint: Path, tmp_path: Path, kv_dtype: str) -> None:
    """Bit for bit, in float32 with one form of attention: a different last bit may change the rounding of a row to
    eight bits."""
    seed = random.randrange(2**31)
    script = _script(random.Random(seed))
    if kv_dtype == "fp8_per_tensor":
        add_latent_scales(checkpoint, 3)
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


def test_scales_of_a_checkpoint_are_applied(tmp_path: Path) -> None:
    """Log-probabilities near those of a cache in float32, also with the weights read again; kv_b is read by name
    without the scale."""
    dense = {"num_hidden_layers": 2, "first_k_dense_replace": 2}  # no router, whose choices rounded rows change
    path = make_checkpoint("deepseek_v3", tmp_path / "model", seed=random.randrange(2**31), **dense)
    scales = add_latent_scales(path, 2)
    prompt = [random.randrange(250) for _ in range(40)]
    greedy = {"temperature": 0.0, "ignore_eos": True}
    script = [Scripted("r", prompt, 8, sampling=greedy, logprob=True, logprob_start=0)]
    flags = {"dtype": "float32", "max_total_tokens": 64}
    found = []
    for kv_dtype in ("auto", "fp8_per_tensor"):
        engine = InProcessEngine(path, tmp_path / kv_dtype, kv_cache_dtype=kv_dtype, **flags)
        try:
            found.append(engine.run(script)["r"])
            notes = [note for note in engine.config.notes if "k_scale" in note]
            assert (engine.config.model.latent_scales, len(notes)) == (((), 0) if kv_dtype == "auto" else (scales, 1))
            weights, name = engine.worker.weights, "model.layers.1.self_attn.kv_b_proj.weight"
            assert weights is not None
            weights.check(CheckpointArgs(str(path)))
            weights.stage(CheckpointArgs(str(path)))
            weights.commit()
            assert engine.run(script)["r"] == found[-1]
            read = weights.reading.read(ReadArgs(name, 1000))
        finally:
            engine.close()
        want = load_file(path / "model.safetensors")[name].numpy()
        got = np.full(want.size, np.nan, dtype=np.float32)
        got[np.frombuffer(read["numbers"], dtype=np.int64)] = np.frombuffer(read["values"], dtype=np.float32)
        assert np.array_equal(got.reshape(want.shape), want)
    exact, rounded = found
    errors = [abs(a.logprob - b.logprob) for a, b in zip(exact.prompt_logprobs[1:], rounded.prompt_logprobs[1:])]
    for i, (a, b) in enumerate(zip(exact.logprobs, rounded.logprobs)):
        if exact.token_ids[: i + 1] != rounded.token_ids[: i + 1]:
            break
        errors.append(abs(a.logprob - b.logprob))
    assert len(errors) > 38 and sum(errors) / len(errors) < 0.2, errors


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_draft_models_scales_are_its_own(kind: str, tmp_path: Path) -> None:
    """An EAGLE head of two latent layers, and a whole draft model, with scales; the target has none."""
    pair = make_pair("eagle2 of two mla layers", tmp_path, steps=1, texts=1)
    flags, draft = pair.flags(kv_cache_dtype="fp8_per_tensor"), pair.head_path
    if kind == "model":
        draft = tmp_path / "draft"
        shutil.copytree(pair.path, draft)
        flags |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)}
    scales = add_latent_scales(draft, 2)
    engine = InProcessEngine(pair.path, tmp_path / "status", **flags)
    try:
        config, sampling = engine.config, {"temperature": 0.0, "ignore_eos": True}
        assert config.model.latent_scales == ()
        assert config.draft_model is not None and config.draft_model.latent_scales[:2] == scales
        held = {module._latent_scale for module in gc.get_objects() if type(module) is MLAAttention}
        assert set(scales) <= held
        script = [Scripted("r", pair.prompts[1], 8, sampling=sampling)]
        assert len(engine.run(script)["r"].token_ids) == 8
    finally:
        engine.close()
    tensors = load_file(file := draft / "model.safetensors")
    name = next(name for name in tensors if name.startswith("model.layers.0.") and name.endswith(LATENT_SCALES))
    save_file(tensors | {name: torch.zeros(())}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{draft.name}.*layer 0 \(k_scale\) is not one positive number"):
        prepare(EngineArgs.from_kwargs(model_path=str(pair.path), device="cpu", **flags))


def test_scales_that_cannot_be_applied_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path / "model", seed=random.randrange(2**31), num_mtp_layers=1)
    scales = add_latent_scales(path, 4)

    def launch(**flags: Any) -> ResolvedConfig:
        flags = {"model_path": str(path), "kv_cache_dtype": "fp8_per_tensor"} | flags
        return prepare(EngineArgs.from_kwargs(device="cpu", max_total_tokens=64, **flags))

    assert launch().model.latent_scales == scales
    with pytest.raises(ConfigError, match=r"--enable-torch-compile: .*k_scale.*fp8_ds_mla"):
        launch(enable_torch_compile=True, attention_backend="torch", ops_backend="torch", linear_backend="torch")
    tensors = load_file(file := path / "model.safetensors")
    name = next(name for name in tensors if name.startswith("model.layers.1.") and name.endswith(LATENT_SCALES))
    wrong = [torch.tensor(value) for value in (0.0, -1.0, float("nan"), float("inf"))]
    for value in (*wrong, torch.ones(2), torch.ones((), dtype=torch.int32)):
        save_file(tensors | {name: value}, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=r"layer 1 \(k_scale\) is not one positive number; .*fp8_ds_mla"):
            launch()
        assert launch(kv_cache_dtype="fp8_ds_mla").model.latent_scales == ()

    dense = make_checkpoint("qwen3", tmp_path / "dense", seed=random.randrange(2**31))
    add_latent_scales(dense, 3)
    heads = launch(model_path=str(dense), kv_cache_dtype="fp8_e4m3")  # every head has a scale of its own
    assert heads.model.latent_scales == ()


def test_the_cache_is_what_the_checkpoint_states(tmp_path: Path) -> None:
    """A checkpoint of which only the KV cache was calibrated: its scales are not read, answers are those of the
    flag."""
    path = make_checkpoint("qwen3", tmp_path / "model", seed=random.randrange(2**31))
    add_latent_scales(path, 3)
    fields = json.loads((path / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    script = [Scripted("r", [random.randrange(250) for _ in range(40)], 8, sampling={"temperature": 0.0}, logprob=True)]
    found = []
    for flags, extra in (({}, {"quantization_config": section}), ({"kv_cache_dtype": "fp8_e4m3"}, {})):
        (path / "config.json").write_text(json.dumps(fields | extra))
        engine = InProcessEngine(path, tmp_path / f"status{len(found)}", max_total_tokens=64, **flags)
        try:
            assert engine.config.kv_cache_dtype == "fp8_e4m3"
            found.append(engine.run(script)["r"].logprobs)
        finally:
            engine.close()
    assert found[0] == found[1]
