"""The float64 formulas of Kimi K3 against layers of transformers: Ling's Kimi Delta Attention has bounded decays too,
and Kimi Linear's MLA and router are Kimi K3's, but for the output gate. No model of transformers has the other parts.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.models.kimi_k3 import TEXT, K3Reference, make_k3
from tests.models.test_parity import assert_close

HEADS, WIDTH, TAPS = 4, 12, 4
DELTA, MLA, MOE = "layers.0.self_attn", "layers.1.self_attn", "layers.1.block_sparse_moe"


class Checkpoint:
    """Random tensors of the text model, their formulas, and rows x [T, D] that a layer may read."""

    def __init__(self, path: Path) -> None:
        seed = random.randrange(2**31)
        made = make_k3(path, seed, tokenizer=False, mla_use_output_gate=False)
        self.reference = K3Reference(made)
        self.fields: dict[str, Any] = self.reference.fields
        self._tensors = load_file(made / "model.safetensors")
        self.x = torch.randn(90, self.fields["hidden_size"], generator=torch.Generator().manual_seed(seed)).double()

    def part(self, block: str) -> dict[str, Tensor]:
        prefix = f"{TEXT}{block}."
        return {n.removeprefix(prefix): t.double() for n, t in self._tensors.items() if n.startswith(prefix)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("k3"))


def loaded(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """The module in float64 with exactly these weights."""
    module.load_state_dict(weights)
    return module.double().eval()


@torch.no_grad()
def test_delta_attention(checkpoint: Checkpoint) -> None:
    """Ling has one matrix in the place of the two of the decays: their product. transformers computes the recurrence in
    float32: a row whose parts cancel differs by more than rounding of its own size."""
    from transformers import BailingHybridConfig
    from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention

    f, own = checkpoint.fields, checkpoint.part(DELTA)
    config = BailingHybridConfig(
        hidden_size=f["hidden_size"], linear_num_heads=HEADS, linear_head_dim=WIDTH, linear_conv_kernel_dim=TAPS,
        hidden_act="silu", rms_norm_eps=f["rms_norm_eps"], kda_safe_gate=True, kda_lower_bound=-5.0,
    )  # fmt: skip
    gate = {"A_log": own.pop("A_log")[:HEADS], "dt_bias": own.pop("dt_bias")}
    gate["f_proj.weight"] = own.pop("f_b_proj.weight") @ own.pop("f_a_proj.weight")
    own["conv1d.weight"] = torch.cat([own.pop(f"{name}_conv1d.weight") for name in "qkv"])
    layer = loaded(BailingHybridDeltaAttention(config, 0), own | {f"forget_gate.{name}": t for name, t in gate.items()})
    assert_close(layer(checkpoint.x[None])[0], checkpoint.reference.delta(f"model.{DELTA}", checkpoint.x))


def kimi_linear(f: dict[str, Any]) -> Any:
    from transformers import KimiLinearConfig

    same = "hidden_size num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
    config = KimiLinearConfig(
        **{name: f[name] for name in same.split()}, num_key_value_heads=f["num_attention_heads"], n_group=1,
        topk_group=1, num_local_experts=f["num_experts"], num_experts_per_tok=f["num_experts_per_token"],
        routed_scaling_factor=f["routed_scaling_factor"], norm_topk_prob=True, rms_norm_eps=f["rms_norm_eps"],
    )  # fmt: skip
    config._attn_implementation = "eager"
    return config


@torch.no_grad()
def test_mla(checkpoint: Checkpoint) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearAttention

    layer = loaded(KimiLinearAttention(kimi_linear(checkpoint.fields), 1), checkpoint.part(MLA))
    x = checkpoint.x
    hidden = torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)[None, None]
    assert_close(layer(x[None], hidden)[0][0], checkpoint.reference.mla(f"model.{MLA}", x), 1e-6)


@torch.no_grad()
def test_router(checkpoint: Checkpoint) -> None:
    """Rows whose experts differ by less than float32 rounds are left out: transformers scores in float32."""
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearTopkRouter

    f, x = checkpoint.fields, checkpoint.x
    weights = {n.removeprefix("gate."): t for n, t in checkpoint.part(MOE).items() if n.startswith("gate.")}
    _, shares, chosen = loaded(KimiLinearTopkRouter(kimi_linear(f)), weights)(x)
    scores = (x @ weights["weight"].T).sigmoid() + weights["e_score_correction_bias"]
    best = scores.topk(f["num_experts_per_token"] + 1).values
    clear = best[:, -2] - best[:, -1] > 1e-5
    assert clear.float().mean() > 0.9
    got = torch.zeros(len(x), f["num_experts"], dtype=shares.dtype).scatter(1, chosen, shares)
    assert_close(got[clear], checkpoint.reference.shares(f"model.{MOE}", x)[clear], 1e-5)
