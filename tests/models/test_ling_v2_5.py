"""Ling 2.6 and Ring 2.5: logits equal the formulas in float64 in every form of a step, with other fields and in FP8;
sizes of the published models, decays, refusals, headers."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe_engine.errors import ConfigError
from moe_engine.models import sizes
from moe_engine.models.config import MLAConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.layers.states.rotated_lightning import decay_rates
from moe_engine.models.tensors.model import model_tensors
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models import stepper
from tests.models.checkpoints import write_tensors
from tests.models.fp8 import dequantize_fp8
from tests.models.ling_v2_5 import LingReference, make_ling, slopes
from tests.models.parameters import num_active_parameters
from tests.models.published import LING_2_6_FLASH, RING_2_5
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_config import parse
from tests.models.test_parity import assert_close, whole

every_row = pytest.mark.parametrize("row", all_rows())
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 600000.0,
        "partial_rotary_factor": 0.5}  # fmt: skip


class Made:
    """A checkpoint, tokens and their logits."""

    def __init__(self, path: Path, **fields: Any) -> None:
        seed = random.randrange(2**31)
        self.path = make_ling(path, seed, tokenizer=False, **fields)
        rng = random.Random(seed)
        self.tokens = [rng.randrange(5, 250) for _ in range(100)]
        self.reference = LingReference(path)
        self.logits = self.reference.logits(self.tokens)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("ling"))


@every_row
def test_whole_prompt(made: Made, row: str) -> None:
    assert_close(whole(stepper.load(made.path, row), made.tokens), made.logits)


@every_row
def test_chunks_then_decodes(made: Made, row: str) -> None:
    model, tokens = stepper.load(made.path, row), made.tokens
    parts = [model.step([Chunk(0, tokens[:37], False)])[0], model.step([Chunk(0, tokens[37:38], True)])[0]]
    parts.append(model.step([Chunk(0, tokens[38:58], False), Chunk(1, tokens[:9], False)])[0])
    parts += [model.step([Chunk(0, [token], True)])[0] for token in tokens[58:66]]
    assert_close(torch.cat(parts), made.logits[:66])


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": YARN}, {"group_norm_size": 1, "num_attention_heads": 4, "num_kv_heads_for_linear_attn": 0},
        {"group_norm_size": 6, "q_lora_rank": None, "partial_rotary_factor": 1.0}, {"layer_group_size": 2},
    ],
    ids=["yarn", "one group", "a group a head", "pairs of layers"],
)  # fmt: skip
def test_other_fields(tmp_path: Path, fields: dict[str, Any]) -> None:
    made = Made(tmp_path, **fields)
    assert_close(whole(stepper.load(made.path, "cpu"), made.tokens), made.logits)


@every_row
def test_fp8_blocks(tmp_path: Path, row: str) -> None:
    """As Ling-2.6-1T is published: lightning attention's projections are quantized too."""
    wide = {"hidden_size": 128, "head_dim": 128, "num_attention_heads": 2, "group_norm_size": 2}
    path = make_ling(tmp_path / "fp8", 5, tokenizer=False, fp8=True, num_kv_heads_for_linear_attn=0, **wide)
    values = dequantize_fp8(load_file(path / "model.safetensors"))
    tokens = torch.randint(0, 250, (40,)).tolist()
    got = whole(stepper.load(path, row), tokens)
    assert_close(got, LingReference(path, values).logits(tokens), 0.2)  # activations are quantized too
    name = "model.layers.0.self_attn.query_key_value"
    assert load_model_config(path).weight_format.bytes_per_element(name, (768, 128), 4) < 2


def test_decays() -> None:
    for heads in (1, 4, 6, 48, 64):
        for layer in (0, 1, 7):
            want = torch.tensor(slopes(heads), dtype=torch.float64) * (1 - (layer - 1) / 7 + 1e-5)
            torch.testing.assert_close(decay_rates(layer, 8, heads), want.float())


@pytest.mark.parametrize(
    ("published", "total", "active", "latents", "state"),
    [(LING_2_6_FLASH, 104e9, 7.4e9, 4, 28 * 32), (RING_2_5, 1012.5e9, 63e9, 10, 70 * 64)],
    ids=["Ling-2.6-flash", "Ring-2.5-1T"],
)
def test_the_published_models(
    tmp_path: Path, published: dict[str, Any], total: float, active: float, latents: int, state: int
) -> None:
    config = parse(tmp_path, published)
    embedding = config.vocab_size * config.hidden_size
    assert sizes.num_parameters(config) == pytest.approx(total, rel=2e-3)
    assert num_active_parameters(config) + embedding == pytest.approx(active, rel=1e-2)
    assert isinstance(config.attention, MLAConfig) and len(config.kv_layers) == latents
    assert config.kv_layers[0] == 7 and config.num_nextn_predict_layers == published["num_nextn_predict_layers"]
    (group,) = config.state_groups
    assert group.num_bytes("bfloat16") == state * 128 * 128 * 4
    assert config.rope.interleaved and config.rope.width == 64
    assert config.rope_of(0).width == 64 and not config.rope_of(0).interleaved and len(config.ropes) == 2
    facts = model_facts(published)
    small = sizes.num_parameters(config) - embedding - facts.num_parameters
    assert 0 <= small < 3e6
    assert [(kind.layers, kind.state_numbers) for kind in facts.attention] == [
        (latents, 0), (len(config.state_layers), state // len(config.state_layers) * 128 * 128),
    ]  # fmt: skip


def test_modules_name_all_tensors(made: Made) -> None:
    """Each tensor belongs to one module, so that a weight update builds it again."""
    loaded = stepper.load(made.path, "torch")
    modules = [module.prefixes for module in loaded.model.modules()]
    for spec in model_tensors(loaded.config):
        assert sum(spec.name.startswith(prefixes) for prefixes in modules) == 1, spec.name


def test_stored_slopes_are_not_read(tmp_path: Path, made: Made) -> None:
    """Converted checkpoints keep the buffers of the published code."""
    tensors = load_file(made.path / "model.safetensors")
    write_tensors(tmp_path, tensors | {"model.layers.0.attention.slope": torch.zeros(6)})
    (tmp_path / "config.json").write_text((made.path / "config.json").read_text())
    assert_close(whole(stepper.load(tmp_path, "cpu"), made.tokens), made.logits)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"linear_silu": True}, "linear_silu True is not supported; supported: False"),
        ({"use_linear_silu": True}, "use_linear_silu True is not supported"),
        ({"linear_rope": False}, "linear_rope False is not supported"),
        ({"use_qk_norm": False}, "use_qk_norm False is not supported"),
        ({"use_qkv_bias": True}, "use_qkv_bias is set"),
        ({"score_function": "softmax"}, "score_function 'softmax' is not supported"),
        ({"group_norm_size": 5}, "group_norm_size 5 groups do not divide the 32 heads"),
        ({"num_kv_heads_for_linear_attn": 8}, "num_kv_heads_for_linear_attn 8 is not supported"),
        ({"layer_group_size": 5}, "layer_group_size 5 does not divide the 32 layers"),
        ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias is false"),
    ],
)
def test_refusals(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(tmp_path, LING_2_6_FLASH | wrong)
