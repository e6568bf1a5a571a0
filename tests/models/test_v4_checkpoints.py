"""Random V4 checkpoints: transformers reads the published names, and each tensor has an effect on the logits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.v4_checkpoints import FIELDS, PUBLISHED_RATES, load_v4, make_v4, v4_model

FORMS = pytest.mark.parametrize("form", [{}, PUBLISHED_RATES], ids=["small rates", "published rates"])


@torch.inference_mode()
def logits(model: Any, ids: list[int]) -> Tensor:
    found: Tensor = model(torch.tensor([ids])).logits[0]
    return found


@FORMS
def test_transformers_reads_the_published_names(tmp_path: Path, form: dict[str, Any]) -> None:
    """The names are those of its own renaming."""
    seed = random.randrange(1 << 30)
    ids = [random.randrange(250) for _ in range(300)]
    path = make_v4(tmp_path, seed, **form)
    fields = {key: value for key, value in (FIELDS | form).items() if value is not None}
    assert torch.equal(logits(load_v4(path), ids), logits(v4_model(fields, seed), ids))


@torch.no_grad()
def test_each_tensor_has_an_effect() -> None:
    """A forgotten tensor cannot stay hidden: the logits change with each of them."""
    model = v4_model(FIELDS, random.randrange(1 << 30))
    ids = [random.randrange(250) for _ in range(100)]
    before = logits(model, ids)
    for name, tensor in model.state_dict().items():
        own = tensor.clone()
        tensor.copy_(own.flip(0) if own.dtype == torch.int64 else own + 0.5 * torch.randn_like(own))
        assert (logits(model, ids) - before).abs().max() > 1e-3, name
        tensor.copy_(own)


def test_each_field_has_an_effect() -> None:
    changes: dict[str, Any] = {
        "swiglu_limit": 2.0, "routed_scaling_factor": 2.5, "index_topk": 5, "sliding_window": 17, "rms_norm_eps": 1e-2,
        "hc_eps": 1e-2, "hc_sinkhorn_iters": 2, "rope_theta": 2e4, "compress_rope_theta": 1e4, "num_hash_layers": 1,
        "rope_scaling": None, "layer_types": list(reversed(FIELDS["layer_types"])), "scoring_func": "sigmoid",
    }  # fmt: skip
    seed, ids = random.randrange(1 << 30), [random.randrange(250) for _ in range(100)]
    before = logits(v4_model(FIELDS, seed), ids)
    for field, value in changes.items():
        assert (logits(v4_model(FIELDS | {field: value}, seed), ids) - before).abs().max() > 1e-3, field


def test_dtypes_are_the_published_ones(tmp_path: Path) -> None:
    tensors = load_file(make_v4(tmp_path, dtype=torch.bfloat16) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32, torch.bfloat16, torch.int64}
    assert tensors["layers.2.attn.compressor.ape"].dtype == tensors["hc_head_fn"].dtype == torch.float32
    assert tensors["layers.2.attn.indexer.compressor.norm.weight"].dtype == torch.bfloat16
    assert tensors["layers.0.ffn.gate.tid2eid"].shape == (tensors["embed.weight"].shape[0], 2)
