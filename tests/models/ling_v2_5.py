"""Ling 2.6 and Ring 2.5: random checkpoints under the published names, and the model's formulas in float64.

transformers has no such model yet; the formulas are those of the published `modeling_bailing_moe_v2_5.py` and of the
functions that it calls (`simple_gla` of flash-linear-attention). The recurrence runs token by token.

Legend: T tokens, D hidden, H heads, W width of a head of lightning attention, N qk_nope, R rotary channels, E experts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.byte_tokenizer import BOS, EOS, VOCAB_SIZE, write_tokenizer
from tests.models.checkpoints import write_tensors
from tests.models.fp8 import quantize_fp8

FIELDS: dict[str, Any] = {
    "architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "bailing_hybrid", "vocab_size": VOCAB_SIZE,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "layer_group_size": 3, "num_attention_heads": 6,
    "num_key_value_heads": 6, "head_dim": 16, "partial_rotary_factor": 0.5, "group_norm_size": 3, "use_qk_norm": True,
    "linear_silu": False, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "qk_head_dim": 24, "v_head_dim": 12, "rope_interleave": True, "rope_theta": 600000.0, "rope_scaling": None,
    "num_experts": 16, "num_experts_per_tok": 4, "num_shared_experts": 1, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "score_function": "sigmoid", "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "router_dtype": "fp32", "moe_router_enable_expert_bias": True, "use_bias": False,
    "use_qkv_bias": False, "num_kv_heads_for_linear_attn": 6, "num_nextn_predict_layers": 0, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": BOS,
    "eos_token_id": EOS, "torch_dtype": "float32",
}  # fmt: skip
"""Layers 2 and 5 are MLA. The number of heads is no power of two."""
LATENT_EPS = 1e-6


def make_ling(
    directory: str | Path, seed: int, tokenizer: bool = True, num_mtp_layers: int = 0, fp8: bool = False,
    **overrides: Any,
) -> Path:  # fmt: skip
    """A checkpoint in float32, or with FP8 projections in blocks; overrides: fields of config.json."""
    path, fields = Path(directory), FIELDS | overrides | {"num_nextn_predict_layers": num_mtp_layers}
    path.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(fields, torch.Generator().manual_seed(seed))
    if fp8:
        tensors = quantize_fp8(tensors)
        section = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
        fields["quantization_config"] = section
    write_tensors(path, tensors)
    (path / "config.json").write_text(json.dumps(fields, indent=1))
    if tokenizer:
        write_tokenizer(path, fields["vocab_size"])
    return path


def is_linear(f: dict[str, Any], layer: int) -> bool:
    return layer < f["num_hidden_layers"] and (layer + 1) % f["layer_group_size"] != 0


def random_tensors(f: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """All tensors under the published names. Norm weights are not 1, router biases not 0."""
    hidden, found = f["hidden_size"], dict[str, Tensor]()

    def add(name: str, *shape: int, scale: float = 0.15) -> None:
        noise = torch.randn(*shape, generator=generator)
        found[f"{name}.weight"] = 1 + 0.2 * noise if "norm" in name else scale * noise

    def mlp(name: str, width: int) -> None:
        for part in ("gate_proj", "up_proj"):
            add(f"{name}.{part}", width, hidden)
        add(f"{name}.down_proj", hidden, width)

    add("model.word_embeddings", f["vocab_size"], hidden)
    add("lm_head", f["vocab_size"], hidden)
    add("model.norm", hidden)
    for i in range(f["num_hidden_layers"] + f["num_nextn_predict_layers"]):
        layer, heads = f"model.layers.{i}", f["num_attention_heads"]
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"{layer}.{name}", hidden)
        if is_linear(f, i):
            width = heads * f["head_dim"]
            add(f"{layer}.attention.query_key_value", 3 * width, hidden)
            add(f"{layer}.attention.g_proj", width, hidden)
            add(f"{layer}.attention.dense", hidden, width)
            add(f"{layer}.attention.g_norm", width)
            for name in ("query_layernorm", "key_layernorm"):
                add(f"{layer}.attention.{name}", f["head_dim"])
        else:
            query = heads * (f["qk_nope_head_dim"] + f["qk_rope_head_dim"])
            if f["q_lora_rank"]:
                add(f"{layer}.attention.q_a_proj", f["q_lora_rank"], hidden)
                add(f"{layer}.attention.q_a_layernorm", f["q_lora_rank"])
                add(f"{layer}.attention.q_b_proj", query, f["q_lora_rank"], scale=0.3)
            else:
                add(f"{layer}.attention.q_proj", query, hidden)
            add(f"{layer}.attention.kv_a_proj_with_mqa", f["kv_lora_rank"] + f["qk_rope_head_dim"], hidden)
            add(f"{layer}.attention.kv_a_layernorm", f["kv_lora_rank"])
            add(f"{layer}.attention.kv_b_proj", heads * (f["qk_nope_head_dim"] + f["v_head_dim"]), f["kv_lora_rank"])
            add(f"{layer}.attention.dense", hidden, heads * f["v_head_dim"])
        if i < f["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", f["intermediate_size"])
        else:
            add(f"{layer}.mlp.gate", f["num_experts"], hidden, scale=0.3)
            found[f"{layer}.mlp.gate.expert_bias"] = 0.1 * torch.randn(f["num_experts"], generator=generator)
            for expert in range(f["num_experts"]):
                mlp(f"{layer}.mlp.experts.{expert}", f["moe_intermediate_size"])
            mlp(f"{layer}.mlp.shared_experts", f["moe_shared_expert_intermediate_size"])
        if i >= f["num_hidden_layers"]:
            add(f"{layer}.eh_proj", hidden, 2 * hidden)
            for name in ("enorm", "hnorm", "final_layernorm"):
                add(f"{layer}.{name}", hidden)
    return found


class LingReference:
    """The logits of a checkpoint, in float64."""

    def __init__(self, path: Path, tensors: dict[str, Tensor] | None = None) -> None:
        self.fields: dict[str, Any] = json.loads((path / "config.json").read_text())
        tensors = load_file(path / "model.safetensors") if tensors is None else tensors
        self._tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.embeddings = self._weight("model.word_embeddings")

    def logits(self, ids: list[int]) -> Tensor:
        """[T, V]."""
        return self.head(self.hidden(ids))

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self._weight("lm_head").T

    def hidden(self, ids: list[int]) -> Tensor:
        """The final norm's result, [T, D]."""
        x = self.embeddings[torch.tensor(ids)]
        for i in range(self.fields["num_hidden_layers"]):
            x = self._layer(i, x)
        return self._norm("model.norm", x)

    def mtp(self, index: int, next_ids: list[int], hidden: Tensor) -> Tensor:
        """v [T, D] of an MTP layer, of the tokens after the hidden states [T, D] of a sequence from its start."""
        layer = f"model.layers.{self.fields['num_hidden_layers'] + index}"
        embedded = self._norm(f"{layer}.enorm", self.embeddings[torch.tensor(next_ids)])
        joined = torch.cat((embedded, self._norm(f"{layer}.hnorm", hidden)), -1) @ self._weight(f"{layer}.eh_proj").T
        return self._norm(f"{layer}.final_layernorm", self._layer(self.fields["num_hidden_layers"] + index, joined))

    def _layer(self, index: int, x: Tensor) -> Tensor:
        f, layer = self.fields, f"model.layers.{index}"
        attention = self.linear if is_linear(f, index) else self.mla
        x = x + attention(index, self._norm(f"{layer}.input_layernorm", x))
        feed_forward = self._mlp if index < f["first_k_dense_replace"] else self._experts
        return x + feed_forward(f"{layer}.mlp", self._norm(f"{layer}.post_attention_layernorm", x))

    def _weight(self, name: str) -> Tensor:
        return self._tensors[f"{name}.weight"]

    def _norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        eps = self.fields["rms_norm_eps"] if eps is None else eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self._weight(name)

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up, down = (self._weight(f"{name}.{part}_proj") for part in ("gate", "up", "down"))
        gated = x @ gate.T
        return (gated * gated.sigmoid() * (x @ up.T)) @ down.T

    def _experts(self, name: str, x: Tensor) -> Tensor:
        f = self.fields
        scores = (x @ self._weight(f"{name}.gate").T).sigmoid()
        biased = scores + self._tensors[f"{name}.gate.expert_bias"]
        grouped = biased.view(len(x), f["n_group"], -1)
        best = grouped.topk(2, -1).values.sum(-1).topk(f["topk_group"], -1).indices
        open_groups = torch.zeros(len(x), f["n_group"]).scatter(1, best, 1).bool()
        allowed = grouped.masked_fill(~open_groups.unsqueeze(-1), -torch.inf).flatten(1)
        chosen = allowed.topk(f["num_experts_per_tok"], -1).indices
        shares = scores.gather(1, chosen)
        shares = f["routed_scaling_factor"] * shares / (shares.sum(-1, keepdim=True) + 1e-20)
        of_all = torch.zeros_like(scores).scatter(1, chosen, shares)
        out = self._mlp(f"{name}.shared_experts", x)
        for expert in range(f["num_experts"]):
            out = out + of_all[:, expert : expert + 1] * self._mlp(f"{name}.experts.{expert}", x)
        return out

    def _angles(self, width: int, count: int) -> tuple[Tensor, float]:
        """Angles [T, width / 2] of positions from 0, and the factor of cosines and sines."""
        f = self.fields
        scaling = f["rope_scaling"] or {}
        theta = scaling.get("rope_theta", f["rope_theta"])
        pairs = torch.arange(0, width, 2, dtype=torch.float64)
        inverse, factor = theta ** (-pairs / width), 1.0
        if scaling.get("rope_type") == "yarn":
            length = scaling["original_max_position_embeddings"]

            def pair_of(turns: float) -> float:
                return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

            low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), width - 1)
            ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
            inverse = inverse * (1 - ramp) + inverse / scaling["factor"] * ramp
            factor = 0.1 * math.log(scaling["factor"]) + 1
        return torch.arange(count, dtype=torch.float64)[:, None] * inverse, factor

    def mla(self, index: int, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        f, tokens, name = self.fields, len(x), f"model.layers.{index}.attention"
        heads, key, turned = f["num_attention_heads"], f["qk_nope_head_dim"], f["qk_rope_head_dim"]
        if f["q_lora_rank"]:
            latent = self._norm(f"{name}.q_a_layernorm", x @ self._weight(f"{name}.q_a_proj").T, LATENT_EPS)
            q = latent @ self._weight(f"{name}.q_b_proj").T
        else:
            q = x @ self._weight(f"{name}.q_proj").T
        q = q.view(tokens, heads, key + turned)
        kv_a = x @ self._weight(f"{name}.kv_a_proj_with_mqa").T
        latent = self._norm(f"{name}.kv_a_layernorm", kv_a[:, : f["kv_lora_rank"]], LATENT_EPS)
        kv = (latent @ self._weight(f"{name}.kv_b_proj").T).view(tokens, heads, -1)
        angles, factor = self._angles(turned, tokens)

        def rotated(y: Tensor) -> Tensor:
            """Adjacent channels are a pair."""
            first, second = y[..., ::2], y[..., 1::2]
            cos, sin = (factor * a.view(tokens, *(1,) * (y.dim() - 2), -1) for a in (angles.cos(), angles.sin()))
            return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)

        scores = torch.einsum("thn,shn->hts", q[..., :key], kv[..., :key])
        scores = scores + torch.einsum("thr,sr->hts", rotated(q[..., key:]), rotated(kv_a[:, f["kv_lora_rank"] :]))
        seen = torch.ones(tokens, tokens).tril().bool()
        shares = (scores * (key + turned) ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hts,shv->thv", shares, kv[..., key:])
        return out.flatten(1) @ self._weight(f"{name}.dense").T

    def linear(self, index: int, x: Tensor) -> Tensor:
        """Lightning attention, [T, D] -> [T, D]."""
        f, tokens, name = self.fields, len(x), f"model.layers.{index}.attention"
        heads, width = f["num_attention_heads"], f["head_dim"]
        q, k, v = (x @ self._weight(f"{name}.query_key_value").T).view(tokens, 3, heads, width).unbind(1)
        turned = int(width * f["partial_rotary_factor"])
        angles, factor = self._angles(turned, tokens)
        cos, sin = factor * angles.cos()[:, None], factor * angles.sin()[:, None]

        def rotated(y: Tensor) -> Tensor:
            """Channel j and channel j + R/2 are a pair; the others stay."""
            first, second = y[..., : turned // 2], y[..., turned // 2 : turned]
            return torch.cat((first * cos - second * sin, second * cos + first * sin, y[..., turned:]), -1)

        q = rotated(self._norm(f"{name}.query_layernorm", q))
        k = rotated(self._norm(f"{name}.key_layernorm", k))
        layer_factor = 1 - (index - 1) / (f["num_hidden_layers"] - 1) + 1e-5
        kept = torch.exp(-layer_factor * torch.tensor(slopes(heads), dtype=torch.float64))
        state, out = x.new_zeros(heads, width, width), x.new_zeros(tokens, heads, width)
        for t in range(tokens):
            state = kept[:, None, None] * state + torch.einsum("hk,hv->hkv", k[t], v[t])
            out[t] = torch.einsum("hk,hkv->hv", q[t], state) * width**-0.5
        grouped = out.reshape(tokens, f["group_norm_size"], -1)
        grouped = grouped / (grouped.square().mean(-1, keepdim=True) + f["rms_norm_eps"]).sqrt()
        gate = (x @ self._weight(f"{name}.g_proj").T).sigmoid()
        return (grouped.flatten(1) * self._weight(f"{name}.g_norm") * gate) @ self._weight(f"{name}.dense").T


def slopes(heads: int) -> list[float]:
    """As the published `build_slope_tensor`."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start**i for i in range(1, heads + 1)]
    near = 2 ** math.floor(math.log2(heads))
    return slopes(near) + slopes(2 * near)[0::2][: heads - near]
