"""Kimi K3: random checkpoints under the published names, and the model's formulas in float64.

transformers has no Kimi K3; the formulas are those of the reports (Kimi Linear, arXiv 2510.26692; Attention Residuals,
arXiv 2603.15031; Kimi K3, arXiv 2607.24653). The delta rule runs token by token. `test_kimi_k3_parts.py` compares the
parts that other models of transformers have.

Legend: T tokens, D hidden, H heads, N qk_nope, R shared key channels, V v_head, C kv_lora_rank, E experts, K chosen,
L latent, W width of a head of Kimi Delta Attention.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.byte_tokenizer import BOS, EOS, VOCAB_SIZE, write_tokenizer
from tests.models.checkpoints import write_tensors

ARCHITECTURE = "KimiK3ForConditionalGeneration"
TEXT, LATENT_EPS = "language_model.model.", 1e-6
UNREAD = "vision_tower.patch_embed.proj.weight"
IMAGE, PATCH = 271, 2
"""The placeholder of an image, and the side of a patch in pixels."""
VISION: dict[str, Any] = {
    "patch_size": PATCH, "init_pos_emb_height": 5, "init_pos_emb_width": 5, "init_pos_emb_time": 4,
    "vt_hidden_size": 16, "qkv_hidden_size": 24, "vt_intermediate_size": 20, "vt_num_attention_heads": 3,
    "vt_num_hidden_layers": 2, "mm_hidden_size": 16, "text_hidden_size": 64, "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool", "mlp_type": "mlp2", "norm_type": "rmsnorm", "mm_projector_type": "patchmergerv2",
    "attn_bias": False, "linear_bias": False, "patch_embed_proj_bias": False, "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear", "projector_ln_eps": 1e-5, "projector_hidden_act": "gelu",
}  # fmt: skip
"""Of a tower, under the published names."""
LINEAR: dict[str, Any] = {
    "head_dim": 12, "num_heads": 4, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True,
    "full_attn_layers": [2, 5], "kda_layers": [1, 3, 4],
}  # fmt: skip
FIELDS: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": VOCAB_SIZE,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "mla_use_nope": True, "mla_use_output_gate": True, "num_experts": 16, "num_experts_per_token": 4,
    "num_shared_experts": 2, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32, "latent_moe_use_norm": True,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True, "num_expert_group": 1, "topk_group": 1,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 1.3, "attn_res_block_size": 2,
    "hidden_act": "situ", "activation_situ_beta": 0.7, "activation_situ_linear_beta": 1.5, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
    "linear_attn_config": LINEAR, "bos_token_id": BOS, "eos_token_id": EOS,
}  # fmt: skip
"""Of the text model. The bounds of the activation are near its values; the last block of residuals has one layer."""


def make_k3(
    directory: str | Path, seed: int, tokenizer: bool = True, vision: dict[str, Any] | None = None, **overrides: Any
) -> Path:
    """A checkpoint in float32, with a vision tower or one unread tensor of it; overrides: fields of the text model."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    fields = FIELDS | overrides
    generator = torch.Generator().manual_seed(seed)
    tensors = random_tensors(fields, generator)
    if vision is not None:
        del tensors[UNREAD]
        tensors |= tower_tensors(vision, generator)
        tensors["language_model.lm_head.weight"][IMAGE] = 0  # no answer has a placeholder
    write_tensors(path, tensors)
    outer = {"architectures": [ARCHITECTURE], "model_type": "kimi_k3", "media_placeholder_token_id": VOCAB_SIZE - 1}
    outer |= {"bos_token_id": BOS, "eos_token_id": EOS, "text_config": fields | {"dtype": "float32"}}
    if vision is not None:
        outer |= {"vision_config": {"model_type": "kimi_k3_vision"} | vision, "media_placeholder_token_id": IMAGE}
    (path / "config.json").write_text(json.dumps(outer, indent=1))
    if tokenizer:
        write_tokenizer(path, fields["vocab_size"])
    return path


def random_tensors(f: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Norms are not 1, biases not 0, scores of the residual's rows differ by about 1."""
    found: dict[str, Tensor] = {}
    hidden, kda = f["hidden_size"], f["linear_attn_config"]
    noise = partial(torch.randn, generator=generator)

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        found[f"{name}.weight"] = scale * noise(rows, columns) * columns**-0.5

    def norm(name: str, width: int) -> None:
        found[f"{name}.weight"] = 1 + 0.2 * noise(width)

    def scores(name: str) -> None:
        norm(f"{name}_norm", hidden)
        matrix(f"{name}_proj", 1, hidden)

    def mlp(name: str, width: int) -> None:
        for part in ("gate_proj", "up_proj"):
            matrix(f"{name}.{part}", width, hidden, 1.5)
        matrix(f"{name}.down_proj", hidden, width, 2.0)

    def mla(name: str) -> None:
        heads, key, value = f["num_attention_heads"], f["qk_nope_head_dim"], f["v_head_dim"]
        shared, latent, query = f["qk_rope_head_dim"], f["kv_lora_rank"], f["q_lora_rank"]
        matrix(f"{name}.q_a_proj", query, hidden)
        norm(f"{name}.q_a_layernorm", query)
        matrix(f"{name}.q_b_proj", heads * (key + shared), query, 2.0)
        matrix(f"{name}.kv_a_proj_with_mqa", latent + shared, hidden)
        norm(f"{name}.kv_a_layernorm", latent)
        matrix(f"{name}.kv_b_proj", heads * (key + value), latent, 2.0)
        if f["mla_use_output_gate"]:
            matrix(f"{name}.g_proj", heads * value, hidden)
        matrix(f"{name}.o_proj", hidden, heads * value, 2.0)

    def delta(name: str) -> None:
        heads, width, taps = kda["num_heads"], kda["head_dim"], kda["short_conv_kernel_size"]
        for part in "qkv":
            matrix(f"{name}.{part}_proj", heads * width, hidden)
            found[f"{name}.{part}_conv1d.weight"] = 0.5 * noise(heads * width, 1, taps)
        for part in "f" if kda["use_full_rank_gate"] else "fg":
            matrix(f"{name}.{part}_a_proj", width, hidden)
            matrix(f"{name}.{part}_b_proj", heads * width, width)
        if kda["use_full_rank_gate"]:
            matrix(f"{name}.g_proj", heads * width, hidden)
        matrix(f"{name}.b_proj", heads, hidden)
        rates = torch.rand(max(heads, width), generator=generator)  # the published file has more than heads
        found[f"{name}.A_log"] = (0.02 + rates).log()
        found[f"{name}.dt_bias"] = 0.3 * noise(heads * width)
        norm(f"{name}.o_norm", width)
        matrix(f"{name}.o_proj", hidden, heads * width, 2.0)

    def experts(name: str) -> None:
        latent, width = f["routed_expert_hidden_size"], f["moe_intermediate_size"]
        matrix(f"{name}.gate", f["num_experts"], hidden, 2.0)
        found[f"{name}.gate.e_score_correction_bias"] = 0.1 * noise(f["num_experts"])
        matrix(f"{name}.routed_expert_down_proj", latent, hidden)
        norm(f"{name}.routed_expert_norm", latent)
        matrix(f"{name}.routed_expert_up_proj", hidden, latent)
        for expert in range(f["num_experts"]):
            for part in ("w1", "w3"):
                matrix(f"{name}.experts.{expert}.{part}", width, latent, 1.5)
            matrix(f"{name}.experts.{expert}.w2", latent, width)
        mlp(f"{name}.shared_experts", width * f["num_shared_experts"])

    found[f"{TEXT}embed_tokens.weight"] = noise(f["vocab_size"], hidden)
    for i in range(f["num_hidden_layers"]):
        layer = f"{TEXT}layers.{i}"
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        scores(f"{layer}.self_attention_res")
        scores(f"{layer}.mlp_res")
        (mla if i + 1 in kda["full_attn_layers"] else delta)(f"{layer}.self_attn")
        if i < f["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", f["intermediate_size"])
        else:
            experts(f"{layer}.block_sparse_moe")
    scores(f"{TEXT}output_attn_res")
    norm(f"{TEXT}norm", hidden)
    matrix("language_model.lm_head", f["vocab_size"], hidden, 2.0)
    found[UNREAD] = noise(8, 3, 2, 2)
    return found


def tower_tensors(v: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Random tensors of a tower and its projector, under the published names."""
    width, inner, mlp, out = (
        v[f"{name}_size"] for name in ("vt_hidden", "qkv_hidden", "vt_intermediate", "text_hidden")
    )
    shapes = {UNREAD: (width, 3, PATCH, PATCH)}
    shapes["vision_tower.patch_embed.pos_emb.weight"] = (v["init_pos_emb_height"], v["init_pos_emb_width"], width)
    for i in range(v["vt_num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{i}"
        shapes |= {f"{block}.{name}.weight": (width,) for name in ("norm0", "norm1")}
        shapes |= {f"{block}.wqkv.weight": (3 * inner, width), f"{block}.wo.weight": (width, inner)}
        shapes |= {f"{block}.mlp.fc0.weight": (mlp, width), f"{block}.mlp.fc1.weight": (width, mlp)}
    shapes |= {"vision_tower.encoder.final_layernorm.weight": (width,), "mm_projector.post_norm.weight": (out,)}
    shapes |= {f"mm_projector.proj.{i}.weight": (rows, 4 * width) for i, rows in ((0, 4 * width), (2, out))}
    return {
        name: ("norm" in name) + (0.2 if "norm" in name else 0.4) * torch.randn(*shape, generator=generator)
        for name, shape in shapes.items()
    }


class K3Reference:
    """The logits of a checkpoint, in float64."""

    def __init__(self, path: Path, tensors: dict[str, Tensor] | None = None) -> None:
        self.fields: dict[str, Any] = json.loads((path / "config.json").read_text())["text_config"]
        tensors = load_file(path / "model.safetensors") if tensors is None else tensors
        self._tensors = {name.removeprefix("language_model."): t.double() for name, t in tensors.items()}
        self.embeddings = self._weight("model.embed_tokens")

    def logits(self, ids: list[int], images: Tensor | None = None) -> Tensor:
        """[T, V]. images: see `streams`."""
        return self.hidden(ids, images) @ self._weight("lm_head").T

    def hidden(self, ids: list[int], images: Tensor | None = None) -> Tensor:
        """The final norm's result, [T, D]."""
        return self._norm("model.norm", self.streams(ids, images)[-1])

    def streams(self, ids: list[int], images: Tensor | None = None) -> list[Tensor]:
        """What each layer's first norm reads, and the final one: [T, D] each. images: rows of the image tokens."""
        f, found = self.fields, list[Tensor]()
        rows = [self._weight("model.embed_tokens")[torch.tensor(ids)]]  # the embedding, then the sum of each block
        if images is not None:
            rows[0][torch.tensor(ids) == IMAGE] = images
        for i in range(f["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            found.append(self._mixed(f"{layer}.self_attention_res", rows))
            x = self._norm(f"{layer}.input_layernorm", found[-1])
            is_mla = i + 1 in f["linear_attn_config"]["full_attn_layers"]
            mixed = (self.mla if is_mla else self.delta)(f"{layer}.self_attn", x)
            if i % f["attn_res_block_size"]:
                rows[-1] = rows[-1] + mixed
            else:
                rows.append(mixed)
            x = self._norm(f"{layer}.post_attention_layernorm", self._mixed(f"{layer}.mlp_res", rows))
            is_dense = i < f["first_k_dense_replace"]
            out = self._mlp(f"{layer}.mlp", x) if is_dense else self._experts(f"{layer}.block_sparse_moe", x)
            rows[-1] = rows[-1] + out
        return [*found, self._mixed("model.output_attn_res", rows)]

    def _weight(self, name: str) -> Tensor:
        return self._tensors[f"{name}.weight"]

    def _norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        eps = self.fields["rms_norm_eps"] if eps is None else eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self._weight(name)

    def _mixed(self, name: str, rows: list[Tensor]) -> Tensor:
        if len(rows) == 1:
            return rows[0]
        stacked = torch.stack(rows, 1)
        scores = self._norm(f"{name}_norm", stacked) @ self._weight(f"{name}_proj")[0]
        return torch.einsum("tn,tnd->td", scores.softmax(-1), stacked)

    def _situ(self, gate: Tensor, up: Tensor) -> Tensor:
        beta, bound = self.fields["activation_situ_beta"], self.fields["activation_situ_linear_beta"]
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bound * torch.tanh(up / bound)

    def _mlp(self, name: str, x: Tensor, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Tensor:
        gate, up, down = (self._weight(f"{name}.{part}") for part in parts)
        return self._situ(x @ gate.T, x @ up.T) @ down.T

    def shares(self, name: str, x: Tensor) -> Tensor:
        """Weights of the experts for the tokens x [T, D], 0 where they are not chosen: [T, E]."""
        f = self.fields
        scores = (x @ self._weight(f"{name}.gate").T).sigmoid()
        bias = self._tensors[f"{name}.gate.e_score_correction_bias"]
        chosen = (scores + bias).topk(f["num_experts_per_token"]).indices
        weights = scores.gather(1, chosen)
        weights = f["routed_scaling_factor"] * weights / weights.sum(-1, keepdim=True)
        return torch.zeros_like(scores).scatter(1, chosen, weights)

    def _experts(self, name: str, x: Tensor) -> Tensor:
        shares = self.shares(name, x)
        inner = x @ self._weight(f"{name}.routed_expert_down_proj").T
        mixed = torch.zeros_like(inner)
        for expert in range(self.fields["num_experts"]):
            mixed += shares[:, expert : expert + 1] * self._mlp(f"{name}.experts.{expert}", inner, ("w1", "w3", "w2"))
        routed = self._norm(f"{name}.routed_expert_norm", mixed) @ self._weight(f"{name}.routed_expert_up_proj").T
        return routed + self._mlp(f"{name}.shared_experts", x)

    def mla(self, name: str, x: Tensor) -> Tensor:
        """MLA of the block `name` for x [T, D]: [T, D]."""
        f, tokens = self.fields, len(x)
        heads, key, shared = f["num_attention_heads"], f["qk_nope_head_dim"], f["qk_rope_head_dim"]
        q = self._norm(f"{name}.q_a_layernorm", x @ self._weight(f"{name}.q_a_proj").T, LATENT_EPS)
        q = (q @ self._weight(f"{name}.q_b_proj").T).view(tokens, heads, key + shared)
        kv_a = x @ self._weight(f"{name}.kv_a_proj_with_mqa").T
        latent = self._norm(f"{name}.kv_a_layernorm", kv_a[:, : f["kv_lora_rank"]], LATENT_EPS)
        kv = (latent @ self._weight(f"{name}.kv_b_proj").T).view(tokens, heads, -1)
        scores = torch.einsum("thn,shn->hts", q[..., :key], kv[..., :key])
        scores += torch.einsum("thr,sr->hts", q[..., key:], kv_a[:, f["kv_lora_rank"] :])
        seen = torch.ones(tokens, tokens).tril().bool()
        shares = (scores * (key + shared) ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hts,shv->thv", shares, kv[..., key:]).flatten(1)
        if f["mla_use_output_gate"]:
            out = out * (x @ self._weight(f"{name}.g_proj").T).sigmoid()
        return out @ self._weight(f"{name}.o_proj").T

    def delta(self, name: str, x: Tensor) -> Tensor:
        """Kimi Delta Attention of the block `name` for x [T, D]: [T, D]."""
        kda, tokens = self.fields["linear_attn_config"], len(x)
        heads, width = kda["num_heads"], kda["head_dim"]

        def convolved(part: str) -> Tensor:
            projected = x @ self._weight(f"{name}.{part}_proj").T
            taps = self._weight(f"{name}.{part}_conv1d")[:, 0]
            padded = torch.cat((projected.new_zeros(taps.shape[1] - 1, projected.shape[1]), projected))
            mixed = sum(padded[i : i + tokens] * taps[:, i] for i in range(taps.shape[1]))
            return (mixed * mixed.sigmoid()).view(tokens, heads, width)  # type: ignore[union-attr]

        def product(part: str) -> Tensor:
            if f"{name}.{part}_proj.weight" in self._tensors:
                return (x @ self._weight(f"{name}.{part}_proj").T).view(tokens, heads, width)
            low = x @ self._weight(f"{name}.{part}_a_proj").T
            return (low @ self._weight(f"{name}.{part}_b_proj").T).view(tokens, heads, width)

        q, k, v = (convolved(part) for part in "qkv")
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        rates = self._tensors[f"{name}.A_log"][:heads].exp()[:, None]
        raw = product("f") + self._tensors[f"{name}.dt_bias"].view(heads, width)
        kept = (kda["gate_lower_bound"] * (rates * raw).sigmoid()).exp()  # [T, H, W]
        beta = (x @ self._weight(f"{name}.b_proj").T).sigmoid()
        state, out = x.new_zeros(heads, width, width), x.new_zeros(tokens, heads, width)
        for t in range(tokens):
            state = kept[t].unsqueeze(-1) * state
            read = torch.einsum("hk,hkv->hv", k[t], state)
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t].unsqueeze(-1) * (v[t] - read))
            out[t] = torch.einsum("hk,hkv->hv", q[t], state) * width**-0.5
        out = self._norm(f"{name}.o_norm", out) * product("g").sigmoid()
        return out.flatten(1) @ self._weight(f"{name}.o_proj").T
