"""Kimi K3: logits equal the formulas in float64 in every form of a step, MXFP4 experts, sizes, config.json, headers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import MLAConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.models.needs import expert_widths, need_of_model
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models import stepper
from tests.models.checkpoints import write_tensors
from tests.models.kimi_k3 import TEXT, K3Reference, make_k3
from tests.models.parameters import num_active_parameters
from tests.models.published import KIMI_K3
from tests.models.quantized_floats import FLOATS
from tests.models.rows import all_rows
from tests.models.sparse import clear_draw
from tests.models.test_parity import assert_close, whole

every_row = pytest.mark.parametrize("row", all_rows())
BOUND = 3e-4
"""Relative; the rounding of float32 in front of softmaxes and top-k."""


def asked(reference: K3Reference) -> tuple[list[int], Tensor]:
    """Tokens, and their logits without a near tie of experts."""

    def draw() -> tuple[list[int], Tensor]:
        tokens = [random.randrange(5, 250) for _ in range(100)]
        return tokens, reference.logits(tokens)

    return clear_draw(draw)


class Made:
    """A checkpoint, tokens and their logits."""

    def __init__(self, path: Path, **fields: Any) -> None:
        seed = random.randrange(2**31)
        self.path = make_k3(path, seed, tokenizer=False, **fields)
        self.tokens, self.logits = asked(K3Reference(path))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("k3"))


@every_row
def test_whole_prompt(made: Made, row: str) -> None:
    assert_close(whole(stepper.load(made.path, row), made.tokens), made.logits, BOUND)


@every_row
def test_chunks_then_decodes(made: Made, row: str) -> None:
    model, sizes_of_chunks = stepper.load(made.path, row), [37, 1, 20]
    parts = [model.step([stepper.Chunk(0, made.tokens[:37], False)])[0]]
    parts.append(model.step([stepper.Chunk(0, made.tokens[37:38], True)])[0])
    parts.append(model.step([stepper.Chunk(0, made.tokens[38:58], False), stepper.Chunk(1, made.tokens[:9], False)])[0])
    done = sum(sizes_of_chunks)
    parts += [model.step([stepper.Chunk(0, [token], True)])[0] for token in made.tokens[done : done + 8]]
    assert_close(torch.cat(parts), made.logits[: done + 8], BOUND)


@every_row
def test_draft_heads_read_what_norms_read(made: Made, row: str) -> None:
    """The hidden states of an EAGLE-3 head: of the embedding, in a block, at the end of one and of the model."""
    model, after = stepper.load(made.path, row), (0, 1, 2, 5)
    assert isinstance(model.model, Decoder)
    model.model.taps = taps = HiddenTaps(after)
    taps.active = True
    model.step([stepper.Chunk(0, made.tokens, False)])
    streams = K3Reference(made.path).streams(made.tokens)
    for got, count in zip(taps.take().chunk(len(after), 1), after, strict=True):
        assert_close(got, streams[count], BOUND)


@pytest.mark.parametrize(
    "fields",
    [{"attn_res_block_size": 1}, {"attn_res_block_size": 9, "mla_use_output_gate": False}],
    ids=["a block a layer", "one block"],
)
def test_other_blocks(tmp_path: Path, fields: dict[str, Any]) -> None:
    made = Made(tmp_path, **fields)
    assert_close(whole(stepper.load(made.path, "cpu"), made.tokens), made.logits, BOUND)


def mxfp4_copy(source: Path, path: Path) -> dict[str, Tensor]:
    """Writes a checkpoint with experts as published; returns plain tensors of the same values."""
    stored, plain = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if ".experts." in name:
            del stored[name]
            parts, plain[name] = FLOATS["compressed mxfp4"][0](tensor)
            stored |= {name.removesuffix(".weight") + end: part.clone() for end, part in parts.items()}
    path.mkdir()
    write_tensors(path, stored)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["quantization_config"] = KIMI_K3["text_config"]["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    return plain


@every_row
def test_mxfp4_experts(tmp_path: Path, made: Made, row: str) -> None:
    plain = mxfp4_copy(made.path, tmp_path / "mxfp4")
    tokens, want = asked(K3Reference(made.path, plain))
    assert not torch.allclose(want, K3Reference(made.path).logits(tokens), rtol=1e-2)
    assert_close(whole(stepper.load(tmp_path / "mxfp4", row), tokens), want, BOUND)


def test_published_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K3))
    config = replace(load_model_config(tmp_path), vision=None)
    assert sizes.num_parameters(config) == pytest.approx(2.78e12, rel=2e-3)
    assert num_active_parameters(config) == pytest.approx(104e9, rel=5e-3)
    assert config.kv_layers == (*range(3, 92, 4), 91, 92)[:23] + (92,) and len(config.state_layers) == 69
    assert config.residual_rows == 9 and config.kv_bytes_per_token("bfloat16") == 24 * 576 * 2
    (group,) = config.state_groups
    assert group.num_bytes("bfloat16") == 69 * (96 * 128 * 128 * 4 + 3 * 96 * 128 * 3 * 2)
    moe, attention = config.moe, config.attention
    assert moe is not None and isinstance(attention, MLAConfig) and config.delta is not None
    assert (moe.beta, moe.limit, moe.latent, moe.latent_norm) == (4.0, 25.0, 3584, True)
    assert (attention.gate_width, config.delta.low_rank, config.delta.bound) == (128, "f", -5.0)
    widths = expert_widths(config, parts=8)
    assert widths is not None and widths.hidden == 3584 and need_of_model(config, "bfloat16").biases
    facts = model_facts(KIMI_K3)
    norms_and_small = sizes.num_parameters(config) - config.vocab_size * config.hidden_size - facts.num_parameters
    assert 0 <= norms_and_small < 2e7, norms_and_small


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is false"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"linear_attn_config": {"gate_lower_bound": 1.0}}, r"gate_lower_bound must be negative"),
        ({"activation_situ_beta": -1.0}, "activation_situ_beta"),
        ({"attn_res_block_size": 0}, "attn_res_block_size"),
    ],
)
def test_refused_fields(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    text = KIMI_K3["text_config"]
    for name, value in wrong.items():
        text = text | {name: text[name] | value if isinstance(value, dict) else value}
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K3 | {"text_config": text}))
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)


def test_headers(made: Made, tmp_path: Path) -> None:
    """The tower's tensors and unused scores are accepted, rates may be those of the heads alone; others are not."""
    config, tensors = load_model_config(made.path), load_file(made.path / "model.safetensors")
    check_headers(made.path, read_checkpoint(made.path), config)
    rates = f"{TEXT}layers.0.self_attn.A_log"
    write_tensors(tmp_path, tensors | {rates: tensors[rates][:4].clone()})
    check_headers(tmp_path, read_checkpoint(tmp_path), config)
    for changed, message in (
        ({rates: tensors[rates][:3].clone()}, r"A_log in model.safetensors has shape \[3\], not \[4\]"),
        ({f"{TEXT}layers.1.mlp_res_norm.bias": torch.ones(64)}, "mlp_res_norm.bias.* belongs to no layer"),
        (
            {f"{TEXT}layers.1.block_sparse_moe.routed_expert_norm.weight": None},
            "routed_expert_norm.weight.* is missing",
        ),
    ):
        found = {name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}
        write_tensors(tmp_path, found)
        with pytest.raises(CheckpointError, match=message):
            check_headers(tmp_path, read_checkpoint(tmp_path), config)
