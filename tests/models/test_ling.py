"""Ling with activations bounded in some layers, as published files of Ling-3.0-flash have them: equal to transformers'
model, whose own code has no bounds, with an activation that has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from moe_engine.models.config_file import load_model_config
from tests.models import stepper
from tests.models.checkpoints import make_checkpoint
from tests.models.published import LING_FLASH
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_parity import assert_close

OF_ROUTED, OF_SHARED = [0, 0.3, 0.2], [None, 0.3, 0.0, 0.1]
"""The second layer bounds both alike, the third its routed experts only; a fourth layer does not exist."""


class BoundedSilu:
    """`act_fn(gate) * up` with silu(gate) at most `limit`, and up within +-limit."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def __call__(self, gate: Tensor) -> BoundedSilu:
        bounded = BoundedSilu(self._limit)
        bounded._active = silu(gate).clamp(max=self._limit)
        return bounded

    def __mul__(self, up: Tensor) -> Tensor:
        return self._active * up.clamp(-self._limit, self._limit)


@torch.no_grad()
def expected(path: Path, tokens: list[int], bounded: bool) -> Tensor:
    import transformers

    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.BailingHybridForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    for layer, routed, shared in zip(model.model.layers, OF_ROUTED, OF_SHARED):
        for module, limit in ((getattr(layer.mlp, "experts", None), routed),
                              (getattr(layer.mlp, "shared_experts", None), shared)):  # fmt: skip
            if bounded and limit:
                del module.act_fn
                object.__setattr__(module, "act_fn", BoundedSilu(limit))
    return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("row", all_rows())
def test_bounded_activations(row: str, tmp_path: Path) -> None:
    path = make_checkpoint("bailing_hybrid", tmp_path / "model", 7, tokenizer=False)
    file, tokens = path / "config.json", torch.randint(0, 256, (40,)).tolist()
    want, other = (expected(path, tokens, bounded) for bounded in (True, False))
    assert float((want - other).norm() / want.norm()) > 0.01  # the bounds matter
    limits = {"expert_swiglu_limit_list": OF_ROUTED, "share_expert_swiglu_limit_list": OF_SHARED}
    file.write_text(json.dumps(json.loads(file.read_text()) | limits))
    model = stepper.load(path, row)
    parts = [(tokens[:20], False), (tokens[20:33], False), *(([token], True) for token in tokens[33:])]
    assert_close(torch.cat([model.step([Chunk(0, part, decode)])[0] for part, decode in parts]), want)


def test_modules_that_stay_unquantized(tmp_path: Path) -> None:
    """Their names in quantization_config are the published ones, whole or the ends of them."""
    plain = ["lm_head", "attention.b_proj", "model.layers.41.attention.dense", "mlp.gate"]
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": plain}
    (tmp_path / "config.json").write_text(json.dumps(LING_FLASH | {"quantization_config": stored}))
    form = load_model_config(tmp_path).weight_format
    found = {
        name: form.bytes_per_element(f"model.layers.{name}", (128, 2560), 2) < 2
        for name in ("0.self_attn.b_proj", "0.self_attn.q_proj", "41.self_attn.o_proj", "40.self_attn.o_proj")
    }
    assert list(found.values()) == [False, True, False, True], found
