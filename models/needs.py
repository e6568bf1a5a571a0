"""Kernel requirements of a model. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from moe_engine.kernels.attention_windows import ChunkWindow
from moe_engine.kernels.device import BlockIndexWidths, ExpertWidths, HeadWidths, IndexWidths, Need
from moe_engine.kernels.weight_forms import WeightForm
from moe_engine.models.config import GQAConfig, MLAConfig, ModelConfig
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.models.expert_format import expert_form, width_group
from moe_engine.models.formats.protocol import family_of
from moe_engine.models.formats.schemes import SchemeFormat
from moe_engine.models.tensors.model import Kind, model_tensors
from moe_engine.parallel.share import Share


def head_widths(model: ModelConfig) -> HeadWidths:
    """Head widths of its attention, of a layer with the most or the widest heads; the config's heads are those of one
    rank, or of all ranks."""
    attention = model.attention
    attention = attention.widest if isinstance(attention, MLAConfig) else attention
    if isinstance(attention, MLAConfig) and attention.pool > 1:
        width = attention.kv_lora_rank
        return HeadWidths(attention.num_heads, 1, width, width, width, 0)
    if isinstance(attention, MLAConfig):
        return HeadWidths(
            attention.num_heads, 1, attention.qk_head_dim, attention.v_head_dim, attention.kv_lora_rank,
            attention.qk_rope_head_dim,
        )  # fmt: skip
    if isinstance(attention, CompressedConfig):
        width = attention.head_dim
        return HeadWidths(attention.num_heads, 1, width, width, width, 0)
    heads = max(kind.num_heads for kind in model.attentions)
    return HeadWidths(heads, attention.num_kv_heads, attention.head_dim, attention.value_width)


def other_widths(model: ModelConfig) -> tuple[HeadWidths, ...]:
    """Those of layers with narrower keys."""
    own, widest = model.attention, head_widths(model)
    found = replace(widest, key=own.qk_head_dim) if isinstance(own, MLAConfig) and own.plain_layers else widest
    return () if found == widest else (found,)


def index_widths(model: ModelConfig) -> IndexWidths | None:
    """Widths of its indexer, the same on every rank."""
    attention = model.attention
    if isinstance(attention, CompressedConfig):
        return IndexWidths(attention.index_heads, attention.index_width, attention.top_k)
    if attention.indexer is None:
        return None
    indexer = attention.indexer
    top_k = indexer.top_k // indexer.pool
    return IndexWidths(indexer.num_heads, attention.index_width, top_k, indexer.fp8_keys)


def block_index_widths(model: ModelConfig) -> BlockIndexWidths | None:
    """Widths of its indexer of blocks; the config's heads are those of one rank, or of all ranks."""
    attention = model.attention
    if not isinstance(attention, GQAConfig) or attention.blocks is None:
        return None
    blocks, rule = attention.blocks, attention.blocks.rule
    return BlockIndexWidths(attention.num_kv_heads, blocks.width, rule.size, rule.top_k, rule.local)


def expert_widths(
    model: ModelConfig, parts: int = 1, dispatched: bool = False, fused: bool = False
) -> ExpertWidths | None:
    """Widths of its routed experts on the first of `parts` ranks that share each."""
    moe = model.moe
    if moe is None:
        return None
    group = width_group(model, keeps_blocks=True)
    cut = None if moe.width % parts else Share(0, parts).cut_in_groups(moe.width, group)
    width = moe.width // parts if cut is None else cut.stop  # the first rank has the most
    return ExpertWidths(model.routed_size, width, moe.top_k, expert_form(model), dispatched, fused)


def linear_forms(model: ModelConfig) -> frozenset[WeightForm]:
    """Forms of the matrices of layers other than experts, by the schemes of the checkpoint; empty without schemes."""
    if (key := "linear forms") not in model.known_sizes:  # a walk over all tensors
        model.known_sizes[key] = _linear_forms(model)
    found: frozenset[WeightForm] = model.known_sizes[key]
    return found


def _linear_forms(model: ModelConfig) -> frozenset[WeightForm]:
    stored = model.weight_format
    if not isinstance(stored, SchemeFormat):
        return frozenset()
    prefixes = (spec.name.removesuffix(".weight") for spec in model_tensors(model) if spec.kind is Kind.LINEAR)
    schemes = {
        stored.scheme_of(prefix) for prefix in prefixes if ".layers." in prefix and family_of(prefix) == "linear"
    }
    return frozenset(scheme.form for scheme in schemes if scheme is not None and scheme.form is not None)


def need_of_model(
    model: ModelConfig, dtype: str, kv_dtype: str = "auto", page_size: int = 1, deterministic: bool = False
) -> Need:
    """Requirements of a model (its local part, on many ranks) and a launch; of its routed experts as on one rank."""
    compressed = isinstance(model.attention, CompressedConfig)
    whole_rows = compressed or (isinstance(model.attention, MLAConfig) and model.attention.pool > 1)
    return Need(
        dtype,
        kv_dtype,
        model.attention.kind,
        page_size,
        head_widths(model),
        deterministic,
        other_widths=other_widths(model),
        moe=model.moe is not None,
        windows=bool(model.windows) and not compressed,
        index=index_widths(model),
        blocks=block_index_widths(model),
        sinks=whole_rows or any(getattr(kind, "sinks", False) for kind in model.attentions),
        biases=model.moe is not None and (model.moe.biased or model.moe.of_all is not None),
        clamped=model.moe is not None and model.moe.clamped,
        delta=model.delta is not None,
        compression=compressed,
        varlen=model.vision is not None,
        experts=expert_widths(model),
        linear_forms=linear_forms(model),
        capped=any(getattr(kind, "score_cap", 0.0) for kind in model.attentions),
        chunked=any(isinstance(window, ChunkWindow) for window in model.windows),
        spans=model.vision is not None and model.vision.sees_whole,
    )
