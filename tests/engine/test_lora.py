"""LoRA adapters in the whole engine: tokens and log-probabilities equal transformers' with merged weights, for batches
of the base model and several adapters, in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moe_engine.planning.memory.lora import slot_bytes
from tests.engine.harness import Answer, InProcessEngine, Scripted
from tests.models.checkpoints import make_checkpoint
from tests.models.lora import make_adapter, merge

DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MIMO: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense"] * 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"targets": DENSE, "more": {}},
    "deepseek_v3": {"targets": MLA, "more": {"num_hidden_layers": 2}},
    "mimo_v2_flash": {"targets": DENSE, "more": MIMO},
    "minimax_m3": {"targets": DENSE, "more": {"moe_layer_freq": [0, 1, 1]}},
}
FLAGS = {"dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 12, "chunked_prefill_size": 48}
NUM_TOKENS = 8
TIE = 1e-4


class Served:
    """A checkpoint with three adapters, and transformers' models of base and merged weights."""

    def __init__(self, kind: str, folder: Path, **more: Any) -> None:
        family, seed = FAMILIES[kind], random.randrange(2**31)
        targets = family["targets"]
        self.path = make_checkpoint(kind, folder / "base", seed=seed, **family["more"], **more)
        attention = [name for name in targets if name not in ("gate_proj", "up_proj", "down_proj")]
        self.adapters = [
            make_adapter(folder / "a", self.path, targets, 4, seed + 1),
            make_adapter(folder / "b", self.path, attention, 6, seed + 2, use_rslora=True, lora_alpha=3),
            make_adapter(
                folder / "c", self.path, targets, 2, seed + 3,
                rank_pattern={"o_proj": 5, r"layers\.1\.mlp.*down_proj": 3},
                alpha_pattern={"layers.0.self_attn.o_proj": 9},
            ),
        ]  # fmt: skip
        merged = [self.path, *(merge(self.path, a, folder / f"merged_{a.name}") for a in self.adapters)]
        self.models = [
            transformers.AutoModelForCausalLM.from_pretrained(
                p, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            for p in merged
        ]
        self.lora_paths = [f"{a.name}={a}" for a in self.adapters]

    def check(self, item: Scripted, answer: Answer, lora_id: int) -> None:
        tokens = answer.token_ids
        assert len(tokens) == NUM_TOKENS and answer.finish is not None
        with torch.inference_mode():
            logits = self.models[lora_id](torch.tensor([item.prompt_ids + tokens[:-1]])).logits[0]
        logits = logits[len(item.prompt_ids) - 1 :]
        expected = logits.log_softmax(-1)
        for i, token in enumerate(tokens):
            assert float(logits[i].max() - logits[i, token]) < TIE * float(logits[i].abs().max()), (lora_id, i)
        if item.logprob:
            found = torch.tensor([entry.logprob for entry in answer.logprobs])
            torch.testing.assert_close(found, expected[range(len(tokens)), tokens], rtol=2e-4, atol=2e-4)


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def script(count: int, lengths: tuple[int, ...] = (1, 3, 20, 70)) -> tuple[list[Scripted], dict[str, int]]:
    """Requests of the base model and of three adapters, with a shared beginning: cached prefixes must not be mixed."""
    rng, shared = random.Random(random.randrange(2**31)), [random.randrange(250) for _ in range(70)]
    items, adapters = [], {}
    for i in range(count):
        adapters[rid := f"r{i}-"] = i % 4
        length = rng.choice(lengths)
        prompt = shared[: rng.randrange(length)]
        prompt += [rng.randrange(250) for _ in range(length - len(prompt))]
        items.append(
            Scripted(
                rid,
                prompt,
                NUM_TOKENS,
                arrives=rng.randrange(12),
                logprob=True,
                sampling={"temperature": 0.0, "ignore_eos": True},
                more={"lora_id": i % 4},
            )
        )
    return items, adapters


@pytest.mark.parametrize("slots", [4, 1])
@pytest.mark.each_value
def test_batches_of_base_and_adapters(served: Served, slots: int, tmp_path: Path) -> None:
    """Also with more adapters than slots."""
    flags = FLAGS | {"lora_paths": served.lora_paths, "max_loras_per_batch": slots}
    engine = InProcessEngine(served.path, tmp_path / "status", **flags)
    try:
        items, adapters = script(20)
        answers = engine.run(items)
        lora, settings = engine.worker.runner.lora, engine.config.lora
        assert lora is not None and settings is not None
        each = slot_bytes(settings, engine.config.model, engine.config.parallel.topology, 4)
        assert lora.num_bytes == slots * each
    finally:
        engine.close()
    for item in items:
        served.check(item, answers[item.rid], adapters[item.rid])


@pytest.mark.parametrize("row", ["cpu", "torch"])
def test_contexts_that_are_expanded_in_parts(served: Served, row: str, tmp_path: Path) -> None:
    """Contexts beyond the limit of MLA's expanded form: in chunks (torch), or in the absorbed form (cpu)."""
    flags = FLAGS | {"lora_paths": served.lora_paths, "attention_backend": row}
    engine = InProcessEngine(served.path, tmp_path / "status", **flags)
    try:
        model: Any = engine.worker.runner.model
        if not hasattr(model.layers[0].attention, "_limits"):
            pytest.skip("attention without a latent")
        for layer in model.layers:
            layer.attention._limits = (32, 10)
        items, adapters = script(8, (40, 90))
        answers = engine.run(items)
    finally:
        engine.close()
    for item in items:
        served.check(item, answers[item.rid], adapters[item.rid])


def test_slots_have_no_columns_of_an_indexer(tmp_path: Path) -> None:
    """DeepSeek V3.2: its keys' rows are between those of q_a and kv_a in the product of the layer's input."""
    path = make_checkpoint("deepseek_v32", tmp_path / "base", random.randrange(2**31), num_hidden_layers=2)
    adapter = make_adapter(tmp_path / "a", path, MLA, 4, 1)
    merged = merge(path, adapter, tmp_path / "merged")
    script, found = [Scripted("r", [random.randrange(250) for _ in range(7)], 1, logprob=True, logprob_start=0)], []
    for served, lora in ((path, {"lora_paths": [f"a={adapter}"], "max_loras_per_batch": 2}), (merged, {})):
        engine = InProcessEngine(served, tmp_path / f"board{len(found)}", **FLAGS, attention_backend="torch", **lora)
        try:
            script[0].more = {"lora_id": 1} if lora else {}
            found.append([entry.logprob for entry in engine.run(script)["r"].prompt_logprobs[1:]])
            if lora:
                held, settings = engine.worker.runner.lora, engine.config.lora
                assert held is not None and settings is not None
                each = slot_bytes(settings, engine.config.model, engine.config.parallel.topology, 4)
                assert held.num_bytes == 2 * each
        finally:
            engine.close()
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=2e-4, atol=2e-4)
