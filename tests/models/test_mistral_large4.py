"""Mistral Large 4: sizes, names of the published files, layers without latents, drafts, weights that are replaced, and
refusals. `test_sparse_attention.py` compares logits, `test_mistral3.py` images."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.kernels.device import HeadWidths
from moe_engine.kernels.vendors.availability import _too_wide
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.loader import LoadOptions, reload
from moe_engine.models.needs import head_widths, need_of_model, other_widths
from moe_engine.planning.prepare import prepare
from moe_engine.tuning.costs.model_facts import model_facts
from moe_engine.worker.weight_parts import pairs
from tests.engine.harness import InProcessEngine, Scripted
from tests.models import sparse, stepper
from tests.models.checkpoints import LARGE4, make_checkpoint
from tests.models.conftest import Oracle
from tests.models.lora import PREFIX, make_adapter, merge
from tests.models.parameters import num_active_parameters
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_parity import assert_close

PUBLISHED: dict[str, Any] = {
    "architectures": ["MistralLarge4ForConditionalGeneration"], "model_type": LARGE4, "image_token_index": 10,
    "spatial_merge_size": 2,
    "text_config": {
        "model_type": "mistral_large4_text", "vocab_size": 204800, "hidden_size": 6144, "intermediate_size": 24576,
        "moe_intermediate_size": 6144, "num_hidden_layers": 72, "num_attention_heads": 64, "n_routed_experts": 128,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128, "index_head_dim": 128,
        "index_n_heads": 32, "eos_token_id": 2,
    },
    "vision_config": {
        "model_type": "pixtral", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 30,
        "num_attention_heads": 16, "patch_size": 14, "image_size": 1540, "hidden_act": "silu",
    },
}  # fmt: skip
"""transformers' defaults, some of which the parser sets."""


def parse(folder: Path, **text: Any) -> ModelConfig:
    fields = PUBLISHED | {"text_config": PUBLISHED["text_config"] | text}
    (folder / "config.json").write_text(json.dumps(fields))
    return load_model_config(folder)


def test_the_published_model(tmp_path: Path) -> None:
    """1T-A52B. A token has rows of 576 channels and index keys of 128 in all layers."""
    config, transformers = parse(tmp_path), pytest.importorskip("transformers")
    assert sizes.num_parameters(config) == pytest.approx(1.052e12, rel=1e-3)
    assert num_active_parameters(config) == pytest.approx(53.5e9, rel=1e-2)
    assert config.kv_bytes_per_token("bfloat16") == 2 * 72 * (576 + 128)
    with torch.device("meta"):
        outer = transformers.MistralLarge4Config(**{k: v for k, v in PUBLISHED.items() if k != "architectures"})
        model = transformers.MistralLarge4ForConditionalGeneration(outer)
    factors = config.rope.width // 2  # a buffer there
    assert sizes.num_parameters(config) == sum(p.numel() for p in model.parameters()) + factors
    attention = config.attention
    assert isinstance(attention, MLAConfig) and attention.plain_layers == tuple(range(3, 72, 4))
    assert (head_widths(config).key, [widths.key for widths in other_widths(config)]) == (192, [128])
    for key in (192, 128):  # a row must have kernels for both
        assert _too_wide(partial(_refusal, key), need_of_model(config, "bfloat16")) == "too wide"
    text = sizes.num_parameters(replace(config, vision=None)) - config.vocab_size * config.hidden_size
    assert model_facts(PUBLISHED).num_parameters == pytest.approx(text, rel=1e-4)


def _refusal(key: int, widths: HeadWidths) -> str | None:
    return "too wide" if widths.key == key else None


@pytest.mark.parametrize("row", all_rows())
def test_layers_with_the_latents_of_others(oracle: Any, row: str) -> None:
    """They cache index keys alone, or nothing if they share a selection too."""
    fields = {"kv_source_layers": [0, 1, 0, 1, 4], "num_hidden_layers": 5}
    fields |= {"indexer_types": ["full", "full", "full", "shared", "full"]}
    want: Oracle = oracle(LARGE4, seed=4, **fields)
    model = stepper.load(want.path, row, page_size=4)
    config = model.config
    shapes = [[list(part) for part in config.kv_parts(i, "bfloat16")] for i in range(5)]
    assert shapes == [[[40], [1, 16]], [[40], [1, 16]], [[1, 16]], [], [[40], [1, 16]]]
    assert_close(sparse.in_parts(model, want.tokens), want.logits)
    names = read_checkpoint(want.path)
    assert not any(".layers.2." in name and "kv_a_" in name for name in names)
    check_headers(want.path, names, config)
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.kv_a_proj_with_mqa.*is missing"):
        check_headers(want.path, names, load_model_config(want.path, {"text_config": {"kv_source_layers": None}}))


def test_draft_layers_are_not_read(tmp_path: Path) -> None:
    """Files may have them; drafts by them are refused."""
    path = make_checkpoint(LARGE4, tmp_path / "model", tokenizer=False)
    tensors = load_file(path / "model.safetensors") | {"mtp_dspark.layers.0.norm.weight": torch.ones(64)}
    save_file(tensors, path / "model.safetensors")
    config = load_model_config(path)
    check_headers(path, read_checkpoint(path), config)
    assert stepper.load(path).step([Chunk(0, [1, 2, 3], False)])[0].isfinite().all()
    flags = {"model_path": str(path), "max_total_tokens": 64, "skip_tokenizer_init": True}
    for algorithm, reason in (("NEXTN", "has no multi-token-prediction layers"), ("DSPARK", "needs a DSpark head")):
        with pytest.raises(ConfigError, match=f"--speculative-algorithm {algorithm}.* {reason}"):
            prepare(EngineArgs.from_kwargs(**flags, speculative_algorithm=algorithm))


def test_weights_are_replaced(tmp_path: Path) -> None:
    """Also the tensor by which the rotary table is computed."""
    paths = [make_checkpoint(LARGE4, tmp_path / str(seed), seed, tokenizer=False) for seed in (1, 2)]
    tokens = torch.randint(0, 250, (40,)).tolist()
    model, want = (stepper.load(path) for path in paths)
    with torch.no_grad():
        for old, new in reload(model.model, paths[1], model.config, LoadOptions("float32")):  # type: ignore[arg-type]
            for kept, read in pairs(old, new):
                kept.copy_(read)
    assert torch.equal(*(one.step([Chunk(0, tokens, False)])[0] for one in (model, want)))


ADAPTED = {
    "wq": "q_proj", "wo": "o_proj", "wkv_b": "kv_b_proj", "wkv_a_with_mqa": "kv_a_proj_with_mqa", "w1": "gate_proj",
    "w2": "down_proj", "w3": "up_proj",
}  # fmt: skip
"""Names of the files, and of transformers' modules, which adapters have."""


def test_an_adapter(tmp_path: Path) -> None:
    """All projections, of layers of both kinds, one without latents; prompts below and beyond the selection."""
    path = make_checkpoint(LARGE4, tmp_path / "base", 5, kv_source_layers=[0, 1, 0, 3])
    adapter = make_adapter(tmp_path / "a", path, list(ADAPTED))
    file = adapter / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "vision" not in name}
    save_file(tensors, file)
    model = sparse.load(merge(path, adapter, tmp_path / "merged"))
    save_file({_module(name): tensor for name, tensor in tensors.items()}, file)
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {"target_modules": list(ADAPTED.values())}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    flags = {"dtype": "float32", "max_total_tokens": 512, "chunked_prefill_size": 32, "lora_paths": [f"a={adapter}"]}
    engine = InProcessEngine(path, tmp_path / "status", **flags)
    greedy, more = {"temperature": 0.0, "ignore_eos": True}, {"lora_id": 1}
    prompts = [torch.randint(0, 250, (length,)).tolist() for length in (5, 60)]
    script = [Scripted(str(i), ids, 5, logprob=True, sampling=greedy, more=more) for i, ids in enumerate(prompts)]
    answers = engine.run(script)
    engine.close()
    for item in script:
        tokens, found = answers[item.rid].token_ids, answers[item.rid].logprobs
        with torch.no_grad():
            logits = model(torch.tensor([item.prompt_ids + tokens[:-1]])).logits[0, len(item.prompt_ids) - 1 :]
        want = logits.log_softmax(-1)[range(5), tokens]
        torch.testing.assert_close(torch.tensor([entry.logprob for entry in found]), want, rtol=2e-4, atol=2e-4)


def _module(name: str) -> str:
    parts = {"attention": "self_attn", "feed_forward": "mlp", "shared_experts": "mlp.shared_experts", **ADAPTED}
    inner = name.removeprefix(PREFIX).split(".")
    return ".".join((f"{PREFIX}model.language_model", *(parts.get(part, part) for part in inner)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers needs 72 whole numbers"),
        ({"kv_source_layers": [*range(71), 72]}, "layer 71 must have the latents of an earlier layer"),
        ({"kv_source_layers": [0, 0, 1, *range(3, 72)]}, "layer 2 must have the latents of an earlier layer"),
        ({"kv_source_layers": [0, 1, 2, 0, *range(4, 72)]}, "layer 3 has rotary positions, or layer 0, and not both"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping must be more than 0"),
        ({"n_routed_experts": None}, "n_routed_experts is missing"),
        ({"index_head_dim": 96}, "index_head_dim must be a power of two"),
    ],
)
def test_refusals(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(tmp_path, **fields)
