"""Tensors of a GQA layer, and the norms and factors of experts beside an MLP (Gemma 4). Imports no torch.

Legend: D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_engine.models.config import GQAConfig
from moe_engine.models.tensors.spec import Kind, TensorSpec, linear, norm

ROTATED_NORMS = ("query_layernorm", "key_layernorm")
"""Norms of q and k after the rotation (Hunyuan, Ling 2.5)."""
ROUTER_NORM, EXPERT_SCALES = "router_norm", "per_expert_scale"
MLP_NORM = "pre_feedforward_layernorm"
"""The norm of the MLP's input, which is in no block."""
INNER_NORMS = ("post_shared_norm", "pre_routed_norm", "post_routed_norm")
"""Norms of the MLP's result, of the experts' input and of their result."""


def gqa_tensors(a: GQAConfig, hidden: int, sinks: str, gate: str) -> Iterator[TensorSpec]:
    """Names without ``self_attn.``. sinks, gate: names of a layer's sinks, and of the projection of its output gate."""
    query, key, value = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.value_width
    parts = (("q_proj", 2 * query if a.output_gate else query), ("k_proj", key), ("v_proj", value))
    for name, rows in parts[:2] if a.shared_values else parts:
        yield from linear(name, rows, hidden, a.qkv_bias)
    yield from linear("o_proj", hidden, a.num_heads * a.value_width, a.o_bias)
    if a.gate_width:
        yield from linear(gate, a.num_heads * a.gate_width, hidden)
    if a.sinks:
        yield TensorSpec(sinks, (a.num_heads,), Kind.WIDE)
    if a.qk_norm and a.qk_norm != "unweighted":
        widths = (query, key) if a.qk_norm == "projection" else (a.head_dim, a.head_dim)
        names = ROTATED_NORMS if a.qk_norm == "rotated" else ("q_norm", "k_norm")
        yield from (norm(name, width) for name, width in zip(names, widths))


def normed_experts_tensors(experts: int, hidden: int) -> Iterator[TensorSpec]:
    """Names without the block's."""
    yield from (norm(name, hidden) for name in (ROUTER_NORM, *INNER_NORMS))
    yield TensorSpec(EXPERT_SCALES, (experts,), Kind.WIDE)
