"""Parts of layers in GGUF files, by architecture, and orders of rows that differ from the hub's. Imports no torch.

Source: llama.cpp's convert_hf_to_gguf and gguf-py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

GEMMA3 = "gemma3"
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
    **_SHARED,
}
"""Modules of a layer -> the hub's."""
_QWEN_MOE = {part: name.replace("experts", "expert") for part, name in _SHARED.items()} | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate"
}
_AFTER = {"post_ffw_norm": "post_feedforward_layernorm"}
_GRANITE_SHARED = "block_sparse_moe.shared_mlp"
_GRANITE_MOE = {part: name.replace("mlp.shared_experts", _GRANITE_SHARED) for part, name in _SHARED.items()}
_MAMBA = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
_DELTA = _MAMBA | {
    "attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_beta": "in_proj_b", "ssm_alpha": "in_proj_a",
}  # fmt: skip
_STATES, _NETS = ({part: f"linear_attn.{name}" for part, name in names.items()} for names in (_MAMBA, _DELTA))
_NEMOTRON = _STATES | {"ffn_latent_down": "mlp.routed_expert_down_proj", "ffn_latent_up": "mlp.routed_expert_up_proj"}
OTHERS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("gemma2", GEMMA3), _AFTER | {"ffn_norm": "pre_feedforward_layernorm"}),
    **dict.fromkeys(("olmo2", "exaone4"), _AFTER),
    "gemma4": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "post_ffw_norm_1": "mlp.post_shared_norm",
        "pre_ffw_norm_2": "mlp.pre_routed_norm",
        "post_ffw_norm_2": "mlp.post_routed_norm",
        "layer_output_scale": "layer_scalar",
    },
    "glm4": {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    "granitemoe": _GRANITE_MOE,
    "granitehybrid": _GRANITE_MOE | _STATES,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen2moe": _QWEN_MOE,
    "qwen3next": _QWEN_MOE | _NETS,
    "qwen35": _NETS,
    "qwen35moe": _QWEN_MOE | _NETS,
}
"""Modules with other names, by architecture."""
_MLP = ("mlp", "gate", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("block_sparse_moe", "gate", "w1", "w3", "w2")
_GRANITE = ("block_sparse_moe", "router", "gate_proj", "up_proj", "down_proj")
DELTA = ("qwen3next", "qwen35", "qwen35moe")
"""Architectures with gated delta nets."""
PERMUTED = ("llama", "granite", "granitemoe", "granitehybrid", "nemotron_h", "nemotron_h_moe")
"""Architectures whose rows of q and k are in llama.cpp's order."""
JOINED = {"phi3": ("attn_qkv.weight", "ffn_up.weight"), "glm4": ("ffn_up.weight",)}
"""Tensors with the rows of q, k and v, or of gate and up, one after the other."""
STATE = "linear_attn"
RATES, OUTPUT = "A_log", "out_proj.weight"
"""Of a layer with a state: the rates of decay, and the projection of its results."""
_BIAS = "e_score_correction_bias"
WITHOUT_END = {
    "ssm_a": f"{STATE}.{RATES}", "ssm_d": f"{STATE}.D", "ssm_dt.bias": f"{STATE}.dt_bias",
    **dict.fromkeys(("exp_probs_b.bias", "exp_probs_b"), f"mlp.gate.{_BIAS}"),
    "ffn_gate_inp.scale": "mlp.router_norm.weight", "ffn_down_exps.scale": "mlp.per_expert_scale",
}  # fmt: skip
"""Tensors whose name is no module's with an end."""
ERNIE = {"exp_probs_b.bias": f"mlp.moe_statics.{_BIAS}"}
"""ERNIE 4.5 has another name for one of them."""
HALVES = {"ssm_ba.weight": (f"{STATE}.in_proj_b.weight", f"{STATE}.in_proj_a.weight")}
"""Tensors with the rows of two."""
LAST, REST = -1, 0
SHAPES = {
    "mlp.shared_expert_gate.weight": (1, LAST), **dict.fromkeys(ERNIE.values(), (1, LAST)),
    f"{STATE}.conv1d.weight": (REST, 1, LAST),
    **{f"{STATE}.{name}": (REST,) for name in ("norm.weight", RATES, "D", "dt_bias")},
}  # fmt: skip
"""Shapes in the hub of tensors with others in a file; LAST: its last dimension, REST: all others."""


def expert_names(architecture: object, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The block of the experts, its router, and gate, up and down of an expert."""
    if architecture in ("granitemoe", "granitehybrid"):
        return _GRANITE
    return _MIXTRAL if architecture == "llama" and metadata.get("llama.expert_count") else _MLP


class Order(NamedTuple):
    """From row `first` on, rows are [a, b, each] in a file, again and again, and [b, a, each] in a hub checkpoint. The
    hub's tensor may be some of `stored` rows in its order, from row `start` on; 0: all."""

    a: int
    b: int
    each: int = 1
    first: int = 0
    start: int = 0
    stored: int = 0

    def places(self, rows: Any) -> Any:
        """The places in the file of these rows of the hub (an int64 tensor)."""
        rows = rows + self.start
        size = self.a * self.b * self.each
        group, within = (rows - self.first) // size * size, (rows - self.first) % size
        b, rest = within // (self.a * self.each), within % (self.a * self.each)
        a, each = rest // self.each, rest % self.each
        return (self.first + group + (a * self.b + b) * self.each + each).where(rows >= self.first, rows)


def orders(architecture: str, number: Callable[[str], int]) -> dict[str, Order]:
    """Of tensors in a layer with a state.

    Args:
        number: a number in the metadata.
    """
    keys, values, width = (number(f"ssm.{name}") for name in ("group_count", "time_step_rank", "state_size"))
    if architecture not in DELTA or not keys or not values or values % keys:
        return {}
    each, value = values // keys, number("ssm.inner_size") // values
    if architecture == "qwen3next":  # b and a alternate between the key heads
        kinds = (("in_proj_b.weight", 0), ("in_proj_a.weight", values))
        return {kind: Order(keys, 2, each, start=start, stored=2 * values) for kind, start in kinds}
    heads, channels = Order(each, keys), Order(each, keys, value)  # value heads of a key head are not adjacent
    mixed = channels._replace(first=2 * keys * width)
    return {
        "in_proj_qkv.weight": mixed, "conv1d.weight": mixed, "in_proj_z.weight": channels, OUTPUT: channels,
        **dict.fromkeys(("in_proj_b.weight", "in_proj_a.weight", RATES, "dt_bias"), heads),
    }  # fmt: skip
