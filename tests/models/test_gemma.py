"""Gemma: published files, text of a checkpoint with a tower, refusals. `test_parity.py` compares logits."""

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
from moe_engine.models.checkpoint_names.names import _common_names
from moe_engine.models.config import GQAConfig
from moe_engine.models.tensors.model import model_tensors
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models import stepper
from tests.models.byte_tokenizer import VOCAB_SIZE
from tests.models.checkpoints import hub_fields, make_checkpoint
from tests.models.stepper import Chunk
from tests.models.test_config import parse

GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256,
    "eos_token_id": [1, 106], "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip

GEMMA4_26B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "vision_config": {},
    "text_config": {
        "model_type": "gemma4_text", "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
        "moe_intermediate_size": 704, "sliding_window": 1024, "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
    },
}  # fmt: skip


def test_the_published_file_of_gemma_3_4b(tmp_path: Path) -> None:
    """It states little more than what differs from the class's defaults. The context has the factor already."""
    config = parse(tmp_path, GEMMA3_4B)
    attention, vision = config.attention, config.vision
    assert isinstance(attention, GQAConfig) and vision is not None and vision.num_tokens((1, 64, 64)) == 256
    assert sizes.num_parameters(config) == pytest.approx(4.3e9, rel=1e-2) and vision.image_token == 262144
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 256)
    full, windowed = config.cache_groups
    assert full.layers == (5, 11, 17, 23, 29) and windowed.window == 1024
    assert [(rope.theta, rope.factor) for rope in config.ropes] == [(1e6, 8.0), (1e4, 1.0)]
    assert config.context_length == config.longest_context == 131072 and config.vocab_size == 262208
    assert config.tie_word_embeddings and config.eos_token_ids == (1, 106)
    facts = model_facts(GEMMA3_4B)
    assert [(kind.layers, kind.keeps) for kind in facts.attention] == [(5, 0), (29, 1024)]


def test_the_published_form_of_gemma_4(tmp_path: Path) -> None:
    """26B-A4B: layers without a window have two heads of 512 channels, whose values are their keys."""
    config = parse(tmp_path, GEMMA4_26B)
    full, windowed = config.attention_of(5), config.attention_of(0)
    assert isinstance(full, GQAConfig) and isinstance(windowed, GQAConfig)
    assert (full.num_kv_heads, full.head_dim, full.shared_values) == (2, 512, True)
    assert (windowed.num_kv_heads, windowed.head_dim, windowed.shared_values) == (8, 256, False)
    assert [(rope.kind, rope.width, rope.turned, rope.softmax_factor) for rope in config.ropes] == [
        ("proportional", 512, 64, 512**0.5), ("default", 256, 0, 16.0)
    ]  # fmt: skip
    assert config.moe is not None and (config.moe.shared_width, config.logit_cap) == (2112, 30.0)
    facts = model_facts(GEMMA4_26B)
    small = sizes.num_parameters(config) - facts.num_parameters  # norms and factors
    assert 0 <= small < 2e6
    assert [(kind.layers, kind.kv_width, kind.keeps) for kind in facts.attention] == [(5, 2048, 0), (25, 4096, 1024)]


def _with_tower(kind: str) -> Any:
    """A model of transformers with a small tower."""
    import transformers

    text = {name: value for name, value in hub_fields(kind).items() if name != "pad_token_id"}
    tower = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    image = VOCAB_SIZE - 1
    if kind == "gemma4":
        tower |= {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4}
        config = transformers.Gemma4Config(text_config=text, vision_config=tower, image_token_id=image)
        return transformers.Gemma4ForConditionalGeneration(config)
    tower |= {"image_size": 16, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=tower, image_token_index=image, mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
@pytest.mark.parametrize("row", ["torch", "cpu"])
def test_text_of_a_checkpoint_with_a_tower(row: str, kind: str, tmp_path: Path) -> None:
    """As transformers saves it; the tower is not read."""
    seed = random.randrange(2**31)
    torch.manual_seed(seed)
    model = _with_tower(kind).float().eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or name.endswith((".layer_scalar", ".router.scale", ".per_expert_scale")):
            tensor.data = (kind == "gemma4") + 0.2 * torch.randn_like(tensor)
    model.save_pretrained(tmp_path)
    ids = torch.randint(1, 200, (1, 50))
    with torch.no_grad():
        want = model(ids).logits[0]
    loaded = stepper.load(tmp_path, row, seed=seed)
    got = torch.cat([loaded.step([Chunk(0, part, False)])[0] for part in (ids[0, :30].tolist(), ids[0, 30:].tolist())])
    assert float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max()) < 2e-4


def test_the_scale_of_embeddings_is_rounded(tmp_path: Path) -> None:
    """To the dtype of activations, as in transformers: sqrt(72) = 8.485 is 8.5 in bfloat16."""
    path = make_checkpoint("gemma3", tmp_path, dtype="bfloat16", hidden_size=72, num_attention_heads=4)
    model = stepper.load(path, "torch", "bfloat16").model
    assert model._embed_scale == float(torch.tensor(72**0.5).bfloat16()) != 72**0.5


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_modules_name_all_tensors(kind: str, tmp_path: Path) -> None:
    """Each tensor belongs to one module, so that a weight update builds it again."""
    loaded = stepper.load(make_checkpoint(kind, tmp_path, tokenizer=False, tie_word_embeddings=False), "torch")
    modules = [module.prefixes for module in loaded.model.modules()]
    for spec in model_tensors(loaded.config):
        assert sum(spec.name.startswith(prefixes) for prefixes in modules) == 1, spec.name


def test_refusals(tmp_path: Path) -> None:
    text = GEMMA3_4B["text_config"]
    for wrong, message in (
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported; supported: null"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported; supported: gelu_pytorch_tanh"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported; supported: False"),
        ({"layer_types": ["full_attention"]}, "layer_types needs 34 of full_attention, sliding_attention"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse(tmp_path, GEMMA3_4B | {"text_config": text | wrong})
    text = GEMMA4_26B["text_config"]
    for wrong, message in (
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input 256 is not supported; supported: 0"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256 is not supported; supported: 0"),
        ({"num_kv_shared_layers": 20}, "num_kv_shared_layers 20 is not supported; supported: 0"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"top_k_experts": None}, "num_experts_per_tok is missing"),
    ):
        kept = {name: value for name, value in (text | wrong).items() if value is not None}
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse(tmp_path, GEMMA4_26B | {"text_config": kept})


def test_a_name_alone_is_changed_as_among_others(tmp_path: Path) -> None:
    """Trainers send some tensors of a model at a time."""
    names = list(load_file(make_checkpoint("gemma4", tmp_path, tokenizer=False) / "model.safetensors"))
    whole = _common_names(names, None)
    assert whole["model.layers.1.router.scale"] == "model.layers.1.mlp.router_norm.weight"
    assert {name: _common_names([name], None)[name] for name in names} == whole
