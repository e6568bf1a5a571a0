"""GLM-5.2 and Qwen3.8 as published: numbers of parameters, and logits of small checkpoints in GLM-5.2's FP8 layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.models import sizes
from moe_engine.models.config import MLAConfig
from tests.models import sparse, stepper
from tests.models.checkpoints import make_checkpoint, write_tensors
from tests.models.fp8 import is_quantized
from tests.models.published import GLM_5_2, QWEN3_8
from tests.models.quantized_floats import blocks_fp8
from tests.models.rows import all_rows
from tests.models.test_config import parse
from tests.models.test_parity import assert_close, whole

LAYERS = 8
KINDS = ["full"] * 3 + ["shared"] * 3 + ["full", "shared"]
MISNAMED = "indexers_proj"
"""What the published list of unquantized modules has in the place of `indexer.weights_proj`."""


def test_parameters_of_the_published_checkpoints(tmp_path: Path) -> None:
    """GLM-5.2's 753,329,921,024 weights and 76 biases of routers; Qwen3.8's 4,892,388,705,238 bytes in BF16."""
    config = parse(tmp_path, GLM_5_2)
    assert sizes.num_parameters(config, include_mtp=True) == 753_329_921_024 + 76 * 256
    assert isinstance(config.attention, MLAConfig) and config.attention.indexer is not None
    own = [i for i in range(config.num_layers) if i not in config.attention.indexer.shared_layers]
    assert own == [0, 1, *range(2, 75, 4)] and config.attention.indexer.shares_drafts
    by_rule = parse(tmp_path, {key: value for key, value in GLM_5_2.items() if key != "indexer_types"})
    assert by_rule.attention == config.attention
    qwen = sizes.num_parameters(parse(tmp_path, QWEN3_8), include_mtp=True)
    assert 2 * qwen == pytest.approx(4_892_388_705_238, rel=1e-5)


def published_fp8(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors as GLM-5.2-FP8 stores them, plain tensors of the same values): of an indexer `wq_b` and `wk` are FP8."""
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        indexer = ".indexer." in name
        if not (name.endswith(("wq_b.weight", "wk.weight")) if indexer else is_quantized(name)):
            stored[name] = values[name] = tensor
            continue
        parts, values[name] = blocks_fp8(tensor)
        stored |= {name: parts[".weight"], f"{name}_scale_inv": parts[".weight_scale"]}
    return stored, values


@pytest.mark.parametrize("row", all_rows())
def test_logits_of_the_published_fp8_layout(tmp_path: Path, row: str) -> None:
    fields = {"num_hidden_layers": LAYERS, "indexer_types": KINDS, "first_k_dense_replace": 3, "n_shared_experts": 1}
    plain = make_checkpoint("glm_moe_dsa", tmp_path / "plain", tokenizer=False, hidden_size=144, **fields)
    stored, values = published_fp8(load_file(plain / "model.safetensors"))
    assert sum(name.endswith("_scale_inv") and ".indexer." in name for name in stored) == 2 * KINDS.count("full")
    config = json.loads((plain / "config.json").read_text())
    write_tensors(plain, values)
    left = [f"model.layers.{i}.self_attn.{name}" for i in range(LAYERS) for name in (MISNAMED, "indexer.k_norm")]
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": [*left, "lm_head", "model.embed_tokens", "model.norm"],
    }  # fmt: skip
    (fp8 := tmp_path / "fp8").mkdir()
    write_tensors(fp8, stored)
    (fp8 / "config.json").write_text(json.dumps(config))
    tokens, want = sparse.reference_logits(plain, 5)
    assert_close(whole(stepper.load(fp8, row), tokens), want)
