"""The layers of a model by its config.json: their kinds, and the least work of a layer of each kind.

Families: MLA with or without an indexer, of tokens or of pools, GQA with or without windows, gated delta nets
(Qwen3-Next, GLM-5.3-Flash), windows and compressed entries (DeepSeek V4, V4.1), selected blocks (MiniMax-M3); dense
layers and mixtures. Norms, biases and
convolutions are not counted. Bytes are those of the checkpoint: MXFP4 experts count 17 bytes for 32 numbers, integers
of 4 bits 18, whatever an engine makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from benchmarks.step_work import mla_work
from moe_engine.models.config_parsers.compressed import compressed_attention, parse_deepseek_v4
from moe_engine.models.config_parsers.shared_entries import parse_deepseek_v41, shared_attention
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.table import parse_format

BF16, FP32 = 2, 4
MXFP4 = 17 / 32
"""Bytes of a number, with its share of the scale."""
LINEAR, WINDOWED, FULL, SELECTED, HEAVY = "linear", "windowed", "full", "selected", "compressed"
BLOCKS = "block-sparse"
WRITES, SELECTS, READS = "writing", "selecting", "reading"
"""Layers of DeepSeek V4.1 that write and select entries, that only select, and that read what an earlier layer has
selected. The tokens of an entry follow the name."""
_KINDS = {
    "linear_attention": LINEAR, "sliding_attention": WINDOWED, "full_attention": FULL,
    "compressed_sparse_attention": SELECTED, "heavily_compressed_attention": HEAVY,
    "minimax_m3_sparse": BLOCKS,
}  # fmt: skip
LAYER_TYPES = {kind: name for name, kind in _KINDS.items()}
"""Names of mixers in `layer_types`."""
V41 = "deepseek_v41"
INDEX_SCALE = 4
_LATER = 9
"""A layer with experts."""


@dataclass(frozen=True)
class Layer:
    """Work of a layer. Elements are numbers of weights; `flops` are of all heads, for a query token and a token that it
    sees."""

    name: str
    attention: float
    """Elements that ranks of tensor parallelism divide."""
    dense: float
    """Elements of the dense MLP or the shared expert, likewise."""
    gate: float
    """Elements in bfloat16 that each rank reads: of the router, and of what V4 computes entries and streams from."""
    expert: float = 0.0
    """Elements of a routed expert; 0: a dense layer."""
    record: float = 0.0
    """Bytes of KV of a token that attention sees."""
    kv_heads: int = 1
    """Ranks of tensor parallelism that can share a record."""
    flops: float = 0.0
    prefill_flops: float = 0.0
    most: int | None = None
    """Tokens that a query token sees at most: a window, or an indexer's selection."""
    rate: int = 0
    """Tokens of an entry, which has the record of a token; 0: no entries."""
    entries: int | None = None
    """Entries that a query token sees at most."""
    indexed: float = 0.0
    """Bytes of index keys of a context token."""
    index_flops: float = 0.0
    index_parts: int = 1
    """Ranks of tensor parallelism that divide the index heads."""
    state: float = 0.0
    """Bytes of a request's state, read and written in each step."""
    token_flops: float = 0.0
    """Operations of a token on the state."""

    def seen(self, context: float) -> float:
        """Records that a query token reads."""
        own = context if self.most is None else min(context, self.most)
        if not self.rate:
            return own
        entries = context // self.rate
        return own + (entries if self.entries is None else min(entries, self.entries))


def num_experts(config: Mapping[str, Any]) -> int:
    return int(config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts") or 0)


def num_shared(config: Mapping[str, Any]) -> int:
    """Shared experts of the width of routed ones."""
    if width := config.get("shared_expert_intermediate_size"):
        count, rest = divmod(width, config["moe_intermediate_size"])
        return 0 if rest else int(count)
    return int(config.get("n_shared_experts") or 0)


def num_fused(config: Mapping[str, Any]) -> int:
    """Those stored as the routed ones are, which take slots after them."""
    if not num_shared(config):
        return 0
    fields = Fields(config, "config.json")
    parse = {"deepseek_v4": parse_deepseek_v4, V41: parse_deepseek_v41}.get(config["model_type"])
    format = parse_format(fields) if parse is None else parse(fields, {}).weight_format
    parts = (f"model.layers.{_LATER}.mlp.{name}.down_proj" for name in ("experts.0", "shared_experts"))
    return num_shared(config) if len({format.kernel_format(part) for part in parts}) == 1 else 0


def bytes_of(config: Mapping[str, Any]) -> tuple[float, float]:
    """Bytes of a weight of experts, and of a weight of all other products."""
    section = config.get("quantization_config") or {}
    method = section.get("quant_method")
    if method == "mxfp4":
        return MXFP4, BF16
    if method == "awq":
        each = 0.5 + (BF16 + 0.5) / section["group_size"]
        return each, each
    if method == "compressed-tensors":
        weights = section["config_groups"]["group_0"]["weights"]
        if weights["strategy"] == "channel":
            return 1, 1
        # experts only, as Kimi K2 is published
        return weights["num_bits"] / 8 + BF16 / weights["group_size"], BF16
    if config.get("expert_dtype") == "fp4":
        return MXFP4, 1
    return (1, 1) if method == "fp8" else (BF16, BF16)


def kinds_of(config: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """(mixer, mixture of experts) of each layer."""
    layers = config["num_hidden_layers"]
    return list(zip(_mixers(config, layers), _mixtures(config, layers), strict=True))


def _mixers(config: Mapping[str, Any], layers: int) -> list[str]:
    if config["model_type"] == V41:
        a = shared_attention(Fields(config, "config.json"))
        parts = [WRITES if a.writes(i) else SELECTS if a.selects(i) else READS for i in range(layers)]
        return [f"{parts[i]} {a.rate(i)}" if a.rate(i) else WINDOWED for i in range(layers)]
    if (given := config.get("layer_types")) is not None:
        return [_KINDS[kind] for kind in given[:layers]]
    if config["model_type"] == "gpt_oss":
        return [WINDOWED if i % 2 == 0 else FULL for i in range(layers)]
    if every := config.get("full_attention_interval"):
        return [FULL if (i + 1) % every == 0 else LINEAR for i in range(layers)]
    return [FULL] * layers


def _mixtures(config: Mapping[str, Any], layers: int) -> list[bool]:
    if not num_experts(config):
        return [False] * layers
    if (given := config.get("mlp_layer_types")) is not None:
        return [kind == "sparse" for kind in given[:layers]]
    first, dense = config.get("first_k_dense_replace", 0), config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step", 1)
    return [i >= first and i not in dense and (i + 1) % step == 0 for i in range(layers)]


def name_of(mixer: str, moe: bool, alone: bool) -> str:
    """``MoE layer``, ``windowed MoE layer``; alone: all layers have the same mixer."""
    return ("" if alone else f"{mixer} ") + ("MoE layer" if moe else "dense layer")


def names_of(config: Mapping[str, Any]) -> list[str]:
    """The name of each layer's kind."""
    kinds = kinds_of(config)
    alone = len({mixer for mixer, _ in kinds}) == 1
    return [name_of(mixer, moe, alone) for mixer, moe in kinds]


def layers_of(config: Mapping[str, Any]) -> list[tuple[int, Layer]]:
    """(number of layers, their work) of each kind; of n-gram tables, what they add to layers."""
    kinds = kinds_of(config)
    alone = len({mixer for mixer, _ in kinds}) == 1
    made = []
    for (mixer, moe), alike in groupby(sorted(kinds)):
        mixing, mlp = _mixing(config, mixer), _feed_forward(config, moe)
        mlp["gate"] += mixing.pop("plain", 0)
        made.append((len(list(alike)), Layer(name_of(mixer, moe, alone), **mixing, **mlp)))
    if tables := config.get("engram_layer_ids"):
        made.append((len(tables), Layer("n-gram layer", attention=_of_ngrams(config), dense=0, gate=0)))
    return made


def _of_ngrams(config: Mapping[str, Any]) -> float:
    """Elements of the projection of a token's rows to values, and keys of all streams."""
    rows = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"]
    return float(rows * config["engram_head_dim"] * (config["hc_mult"] + 1) * config["hidden_size"])


def _feed_forward(config: Mapping[str, Any], moe: bool) -> dict[str, Any]:
    hidden = config["hidden_size"]
    if not moe:
        width = config.get("dense_intermediate_size") or config["intermediate_size"]
        return {"dense": 3 * hidden * width, "gate": 0}
    expert = 3 * hidden * (config.get("moe_intermediate_size") or config["intermediate_size"])
    width = config.get("shared_expert_intermediate_size")
    shared = num_shared(config) * expert if width is None else 3 * hidden * width
    return {"dense": shared, "gate": num_experts(config) * hidden, "expert": expert}


def _mixing(config: Mapping[str, Any], mixer: str) -> dict[str, Any]:
    if mixer == LINEAR:
        return _channel_delta(config) if "kv_lora_rank" in config else _delta(config)
    if "kv_lora_rank" in config:
        return _mla(config)
    if config["model_type"] == "deepseek_v4":
        return _entries(config, mixer)
    if config["model_type"] == V41:
        return _shared_entries(config, mixer)
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    queries = 2 * heads if "linear_num_value_heads" in config else heads  # a gate beside each query
    pair = 4 * heads * width
    most = config["sliding_window"] if mixer == WINDOWED else None
    attention, found = hidden * width * (queries + heads + 2 * kv_heads), {}
    if mixer == BLOCKS:
        index, most = config["index_head_dim"], config["index_topk_blocks"] * config["index_block_size"]
        attention += hidden * index * (kv_heads + 1)
        found = {"indexed": index * BF16, "index_flops": 2 * kv_heads * index, "index_parts": kv_heads}
    return found | {
        "attention": attention, "record": 2 * kv_heads * width * BF16,
        "kv_heads": kv_heads, "flops": pair, "prefill_flops": pair, "most": most,
    }  # fmt: skip


def _mla(config: Mapping[str, Any]) -> dict[str, Any]:
    work, found = mla_work(config), {}
    weights = work.weights
    if top_k := config.get("index_topk"):
        heads, width, hidden = config["index_n_heads"], config["index_head_dim"], config["hidden_size"]
        weights += (config["q_lora_rank"] or hidden) * heads * width + hidden * (width + heads)
        found = {"most": top_k, "indexed": width + INDEX_SCALE, "index_flops": 2 * heads * width}
    if pool := config.get("index_kpool"):  # keys of pools in bfloat16, weighted by gates; tokens after the last pool
        weights += hidden * width
        found |= {
            "most": top_k + pool - 1, "indexed": width * BF16 / pool, "index_flops": 2 * heads * width / pool,
            "plain": _of_streams(config),
        }  # fmt: skip
    return found | {
        "attention": weights, "record": work.kv_elements * BF16, "flops": work.decode_flops,
        "prefill_flops": work.prefill_flops,
    }  # fmt: skip


def _of_streams(config: Mapping[str, Any]) -> int:
    """Elements, counted in bfloat16, of the float32 weights of the streams before a layer's two parts."""
    streams, hidden = config["hc_mult"], config["hidden_size"]
    return int(2 * (FP32 // BF16) * streams * hidden * (2 * streams + streams**2))


def _entries(config: Mapping[str, Any], mixer: str) -> dict[str, Any]:
    """DeepSeek V4. Ranks divide heads and groups of heads. `plain`: elements that each rank reads in bfloat16."""
    a, hidden = compressed_attention(Fields(config, "config.json")), config["hidden_size"]
    layer = [_KINDS[kind] for kind in config["layer_types"]].index(mixer)
    heads = a.num_heads * a.head_dim
    found: dict[str, Any] = {
        "attention": hidden * (a.q_lora_rank + a.head_dim) + heads * (a.q_lora_rank + a.output_rank)
        + a.output_groups * a.output_rank * hidden,
        "plain": hidden * sum(a.projected_widths(layer)) + _of_streams(config),
        "record": a.head_dim * BF16, "flops": 4 * heads, "prefill_flops": 4 * heads, "most": a.window,
        "rate": a.rate(layer),
    }  # fmt: skip
    if a.selects(layer):
        found["attention"] += a.q_lora_rank * a.index_heads * a.index_width
        found["plain"] += hidden * a.index_heads
        found |= {
            "entries": a.top_k, "indexed": a.index_width * BF16 / a.selected_rate,
            "index_flops": 2 * a.index_heads * a.index_width / a.selected_rate,
        }  # fmt: skip
    return found


def _shared_entries(config: Mapping[str, Any], mixer: str) -> dict[str, Any]:
    """DeepSeek V4.1. Rows of n-gram tables, in host memory, are not counted."""
    a, hidden = shared_attention(Fields(config, "config.json")), config["hidden_size"]
    layer = _mixers(config, config["num_hidden_layers"]).index(mixer)
    heads, rate = a.num_heads * a.head_dim, a.rate(layer)
    found: dict[str, Any] = {
        "attention": hidden * (a.q_lora_rank + a.head_dim) + heads * (a.q_lora_rank + a.output_rank)
        + a.output_groups * a.output_rank * hidden,
        "plain": _of_streams(config),
        "record": a.head_dim * BF16, "flops": 4 * heads, "prefill_flops": 4 * heads, "most": a.window,
        "rate": rate, "entries": a.top_k,
    }  # fmt: skip
    if a.writes(layer):
        found["plain"] += hidden * a.head_dim * (1 + (rate > 1)) + a.head_dim * a.index_width
    if a.selects(layer):
        found["attention"] += a.q_lora_rank * a.index_heads * a.index_width
        found["plain"] += 2 * hidden * a.index_heads  # float32
        found |= {
            "indexed": a.index_width * BF16 / rate, "index_flops": 2 * a.index_heads * a.index_width / rate,
        }  # fmt: skip
    return found


def _delta(config: Mapping[str, Any]) -> dict[str, Any]:
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value, hidden = config["linear_key_head_dim"], config["linear_value_head_dim"], config["hidden_size"]
    mixed = 2 * key_heads * key + heads * value
    tail = mixed * (config["linear_conv_kernel_dim"] - 1) * BF16
    return {
        "attention": hidden * (mixed + 2 * heads * value + 2 * heads), "kv_heads": key_heads,
        "state": heads * key * value * FP32 + tail, "token_flops": 6 * heads * key * value,
    }  # fmt: skip


def _channel_delta(config: Mapping[str, Any]) -> dict[str, Any]:
    """Kimi Delta Attention of GLM-5.3-Flash: decays and output gates by products of low rank, whose first matrices each
    rank has."""
    heads, key, hidden = config["linear_num_key_heads"], config["linear_key_head_dim"], config["hidden_size"]
    found = _delta(config)
    wide = heads * key
    return found | {
        "attention": hidden * (4 * wide + heads) + 2 * key * wide, "plain": 2 * hidden * key + _of_streams(config),
    }  # fmt: skip
