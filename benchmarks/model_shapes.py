"""The kernel shapes of any model, from its config.json: one layer of each kind on one GPU.

No command: `benchmarks.kernels --model-path` lists and times the shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.attention_cases import attention_case
from benchmarks.kernel_cases import KernelCase, experts_case, linear_case, op_case
from moe_engine.kernels.attention.shapes import AttentionShape, GroupedModel, LatentModel
from moe_engine.kernels.experts.shapes import ExpertModel, ExpertShape
from moe_engine.kernels.linear.shapes import ModelProducts
from moe_engine.kernels.ops.shapes import ModelOps
from moe_engine.models.config import GQAConfig, MLAConfig, ModelConfig

DECODE_CONTEXT, MOST_DECODES, LEAST_PROMPT = 4096, 256, 512
SAMPLED_ROWS = 256
"""Max timed sampling rows, one per request."""


def name_of(config: ModelConfig) -> str:
    """``DeepseekV3ForCausalLM`` -> deepseekv3."""
    return config.architecture.removesuffix("ForCausalLM").lower()


def products(config: ModelConfig) -> ModelProducts:
    """The projections of a layer's attention, dense MLP and shared expert, and of the head."""
    attention, hidden = config.attention, config.hidden_size
    found: list[tuple[str, int, int]] = []
    if isinstance(attention, GQAConfig):
        heads, width = attention.num_heads, attention.head_dim
        found += [("qkv", (heads + 2 * attention.num_kv_heads) * width, hidden), ("o", hidden, heads * width)]
    elif isinstance(attention, MLAConfig):
        heads, query = attention.num_heads, attention.qk_head_dim
        if attention.q_lora_rank is None:
            found += [("q", heads * query, hidden), ("kv_a", attention.cache_width, hidden)]
        else:
            found += [
                ("q_a+kv_a", attention.q_lora_rank + attention.cache_width, hidden),
                ("q_b", heads * query, attention.q_lora_rank),
            ]
        found.append(("o", hidden, heads * attention.v_head_dim))
    widths = {"dense": config.intermediate_size, "shared": config.moe.shared_width if config.moe else 0}
    if config.moe and all(config.moe_layers):
        widths["dense"] = 0
    for kind, width in widths.items():
        if width:
            found += [(f"{kind}_gate_up", 2 * width, hidden), (f"{kind}_down", hidden, width)]
    return ModelProducts(name_of(config), tuple(found), fp8=bool(config.weight_format.name))


def small_operations(config: ModelConfig) -> ModelOps:
    attention, moe = config.attention, config.moe
    mla = isinstance(attention, MLAConfig)
    return ModelOps(
        name_of(config), config.hidden_size, config.vocab_size, attention.num_heads, config.rope.width,
        latent=getattr(attention, "kv_lora_rank", 0) if mla else 0,
        q_latent=getattr(attention, "q_lora_rank", None) or 0,
        dense_width=config.intermediate_size, shared_width=moe.shared_width if moe else 0,
        num_experts=moe.num_experts if moe else 0, top_k=moe.top_k if moe else 0,
    )  # fmt: skip


def attention_shapes(config: ModelConfig, count: int) -> Iterator[AttentionShape]:
    """`count` decoding requests after `DECODE_CONTEXT` tokens, and one prompt if `count` is large enough."""
    attention, name = config.attention, name_of(config)
    if isinstance(attention, GQAConfig):
        grouped = GroupedModel(name, attention.num_heads, attention.num_kv_heads, attention.head_dim)
        yield grouped.paged(min(count, MOST_DECODES), 1, DECODE_CONTEXT)
        if count >= LEAST_PROMPT:
            yield grouped.paged(1, count, count)
        return
    assert isinstance(attention, MLAConfig)
    latent = LatentModel(
        name, attention.num_heads, attention.kv_lora_rank, attention.qk_rope_head_dim, attention.qk_nope_head_dim,
        attention.v_head_dim,
    )  # fmt: skip
    yield latent.absorbed(min(count, MOST_DECODES), 1, DECODE_CONTEXT)
    if count >= LEAST_PROMPT:
        yield latent.expanded(1, count, count)


def model_cases(config: ModelConfig, tokens: Sequence[int]) -> Iterator[KernelCase]:
    """Cases of every family for steps of these token counts."""
    linear, ops = products(config), small_operations(config)
    shapes = dict.fromkeys(shape for count in tokens for shape in attention_shapes(config, count))
    yield from map(attention_case, shapes)
    for count in tokens:
        yield from map(op_case, (s for s in ops.at(count) if s.operation != "sample" or count <= SAMPLED_ROWS))
        yield from map(linear_case, linear.at(count))
        if config.moe is not None:
            moe = config.moe
            model = ExpertModel(
                linear.model, moe.num_experts, moe.top_k, config.hidden_size, moe.width, bool(config.weight_format.name)
            )
            yield experts_case(ExpertShape(model, count, moe.num_experts))
