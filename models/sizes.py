"""Parameter counts and weight bytes of a model, for the memory ledger. Imports no torch.

Parameters are those listed in `tensors`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.models.expert_format import experts_format, width_group
from moe_engine.models.formats.block_fp8 import BlockFP8Format
from moe_engine.models.formats.gguf import GGUFFormat
from moe_engine.models.formats.online import derived_codes
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.formats.schemes import SchemeFormat
from moe_engine.models.tensors.model import (
    BIASES,
    EMBEDDING,
    GATE_UP_BIAS,
    HEAD_BIAS,
    ROUTERS,
    Kind,
    TensorSpec,
    expert_names,
    has_state,
    is_head,
    layer_index,
    model_tensors,
)
from moe_engine.models.tensors.vision import PREFIX as VISION
from moe_engine.parallel.share import Share
from moe_engine.parallel.topology import Topology

ONE_RANK = Topology()
_KV_B, _LAYER = ".kv_b_proj.weight", "model.layers."
_BY_HEAD = (_KV_B, ".o_a_proj.weight")
"""Projections by head or by group of heads, which kernels hold in the activation dtype."""
_WHOLE_OF_DELTA = (".norm.weight", ".o_norm.weight", ".f_a_proj.weight", ".g_a_proj.weight")
_WHOLE_OF_ADDITIVE = (".query_layernorm.weight", ".key_layernorm.weight")
"""Tensors of a delta net, or of an additive state, that each rank has: the others are divided by heads."""
_ROW_PARALLEL = (".o_proj.weight", ".o_b_proj.weight", ".down_proj.weight", ".out_proj.weight")


def num_parameters(config: ModelConfig, include_mtp: bool = False) -> int:
    """Unique parameters; the tied head and MTP's copies of embedding and head count once."""
    if (key := ("parameters", include_mtp)) not in config.known_sizes:
        counts = (spec.num_elements * spec.copies for spec in model_tensors(config, include_mtp))
        config.known_sizes[key] = sum(counts)
    return config.known_sizes[key]


def num_gate_elements(config: ModelConfig, include_mtp: bool = False) -> int:
    """Elements of all routers' weights."""
    if (key := ("gates", include_mtp)) not in config.known_sizes:
        found = (spec for spec in model_tensors(config, include_mtp) if spec.name.endswith(ROUTERS))
        config.known_sizes[key] = sum(spec.num_elements for spec in found)
    return config.known_sizes[key]


def weight_bytes(
    config: ModelConfig,
    dtype_bytes: int,
    include_mtp: bool = False,
    topology: Topology = ONE_RANK,
    redundant_experts: int = 0,
    format: WeightFormat = PLAIN,
) -> int:
    """Weight bytes of one rank: activation dtype; norms, router and the rotary table (one for all layers) in float32;
    kv_b in both forms. For kernels that keep one copy (the reference rows), and projections of layers in `format`."""
    key = ("weights", dtype_bytes, include_mtp, topology, redundant_experts, format)
    if key not in config.known_sizes:  # a search over forms needs the same sums many times
        config.known_sizes[key] = _weight_bytes(config, dtype_bytes, include_mtp, topology, redundant_experts, format)
    return config.known_sizes[key]


def _weight_bytes(
    config: ModelConfig,
    dtype_bytes: int,
    include_mtp: bool,
    topology: Topology,
    redundant_experts: int,
    format: WeightFormat,
) -> int:
    format = _of_whole_groups(config, format, topology)
    found = _alike_of_model(config, include_mtp, dtype_bytes, topology, format)
    return _sum_of(config, found, dtype_bytes, topology, redundant_experts, format)


def bytes_per_weight(
    config: ModelConfig, dtype_bytes: int, topology: Topology, format: WeightFormat
) -> tuple[float, float]:
    """Mean memory of a weight of the layers' projections as kernels hold them: of routed experts, and of the others.
    Experts' is of the first rank, whose part may be the largest, per weight of an equal part."""
    format = _of_whole_groups(config, format, topology)
    held = {True: Fraction(0), False: Fraction(0)}
    elements = {True: 0, False: 0}
    for spec, each, count in _alike_of_model(config, False, dtype_bytes, topology, format):
        if each is not None:
            number = spec.num_elements * spec.copies * count
            elements[spec.copies > 1] += number
            held[spec.copies > 1] += number * each
    means = {routed: float(held[routed] / elements[routed]) if elements[routed] else dtype_bytes for routed in held}
    return means[True] * _unevenness(config, topology, format), means[False]


def _unevenness(config: ModelConfig, topology: Topology, format: WeightFormat) -> float:
    """The first rank's part of an expert over an equal part: a step takes as long as on the rank that reads the most.
    12 blocks of 128 channels on 8 ranks: 4 / 3."""
    if config.moe is None:
        return 1.0
    width = config.moe.width
    return _largest_part(config, width, topology, format) * topology.moe_tp_size / width


Alike = tuple[TensorSpec, Fraction | None, int]
"""A tensor, bytes of an element if it is a projection of a layer, and the number of such tensors, in other layers."""


def _alike_of_model(
    config: ModelConfig, include_mtp: bool, dtype_bytes: int, topology: Topology, format: WeightFormat
) -> list[Alike]:
    topology = _of_columns(topology, format)
    if (key := ("alike", include_mtp, dtype_bytes, topology, format)) not in config.known_sizes:
        config.known_sizes[key] = _alike(config, model_tensors(config, include_mtp), dtype_bytes, topology, format)
    found: list[Alike] = config.known_sizes[key]
    return found


def _of_columns(topology: Topology, format: WeightFormat) -> Topology:
    """The topology if the format's bytes depend on a rank's columns, else that of all columns."""
    return topology if isinstance(format, SchemeFormat) and "linear" in format.kept else ONE_RANK


def _alike(
    config: ModelConfig, specs: Iterable[TensorSpec], dtype_bytes: int, topology: Topology, format: WeightFormat
) -> list[Alike]:
    """Layers have the same tensors but for their number; a format may store them differently."""
    found: dict[tuple[object, ...], Alike] = {}
    for spec in specs:
        layered = spec.name.startswith(_LAYER) and not is_head(spec.name)
        each = None
        if layered and spec.kind is Kind.LINEAR and not spec.name.endswith(_BY_HEAD):
            shape = _local_shape(config, spec, topology)
            each = format.bytes_per_element(spec.name.removesuffix(".weight"), shape, dtype_bytes)
        name = spec.name[len(_LAYER) :].partition(".")[2] if layered else spec.name
        size = each and each.as_integer_ratio()
        key = layered, name, spec.shape, spec.kind, spec.copies, size
        known = found.get(key)
        found[key] = (spec, each, 1 if known is None else known[2] + 1)
    return list(found.values())


def tensor_bytes(
    config: ModelConfig,
    specs: Iterable[TensorSpec],
    dtype_bytes: int,
    topology: Topology = ONE_RANK,
    redundant_experts: int = 0,
    format: WeightFormat = PLAIN,
) -> int:
    """`weight_bytes` of some tensors of a model, and of its rotary table."""
    format = _of_whole_groups(config, format, topology)
    alike = _alike(config, specs, dtype_bytes, _of_columns(topology, format), format)
    return _sum_of(config, alike, dtype_bytes, topology, redundant_experts, format)


def _sum_of(
    config: ModelConfig, tensors: Iterable[Alike], dtype_bytes: int, topology: Topology, redundant_experts: int,
    format: WeightFormat,
) -> int:  # fmt: skip
    """format: with experts as a rank holds them."""
    plain = wide = 0
    kept, derived = Fraction(0), derived_codes(format, 1) is not None
    head = derived_codes(format, config.hidden_size, is_head=True)
    for spec, each, count in tensors:
        held = count * _held_elements(config, spec, topology, redundant_experts, format)
        if spec.kind in (Kind.WIDE, Kind.INDEX):
            sharded = spec.name.endswith(BIASES) or has_state(config, spec.name)
            wide += held if sharded else count * spec.num_elements
        elif spec.name.endswith(_KV_B):
            plain += held if derived else 2 * held
            kept += _absorbed_bytes(config, held, format) if derived else 0
        elif is_head(spec.name) and head and head.takes(spec.shape[1]):
            kept += held * Fraction(head.num_bytes(1, spec.shape[1]), spec.shape[1])
        elif each is not None:
            kept += held * each
        elif _head_as_stored(spec, format, topology):
            kept += held * format.bytes_per_element(spec.name.removesuffix(".weight"), spec.shape, dtype_bytes)
        else:
            plain += held
    rotary = sum(rope.num_rows(config.context_length) * rope.width for rope in config.ropes)
    return plain * dtype_bytes + 4 * (wide + rotary) + int(kept)


def _head_as_stored(spec: TensorSpec, format: WeightFormat, topology: Topology) -> bool:
    stored = isinstance(format, SchemeFormat) and format.stores_head
    return stored and is_head(spec.name) and topology.tp_size == 1


def _absorbed_bytes(config: ModelConfig, elements: int, format: WeightFormat) -> int:
    """Bytes of kv_b's halves by head, [C, N] and [V, C], with this many elements of all heads."""
    mla = config.attention
    assert isinstance(mla, MLAConfig)
    heads = elements // (mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim))
    keys, values = (mla.kv_lora_rank, mla.qk_nope_head_dim), (mla.v_head_dim, mla.kv_lora_rank)
    forms = [(shape, derived_codes(format, shape[1])) for shape in (keys, values)]
    return heads * sum(form.num_bytes(*shape) for shape, form in forms if form is not None)


def _local_shape(config: ModelConfig, spec: TensorSpec, topology: Topology) -> tuple[int, ...]:
    """Shape of the part of a matrix on a rank, as far as its columns are sharded; of experts the whole shape."""
    if spec.copies > 1 or not spec.name.endswith(_ROW_PARALLEL):
        return spec.shape
    return spec.shape[0], spec.shape[1] // _parts(config, spec.name, topology)


def _held_elements(
    config: ModelConfig, spec: TensorSpec, topology: Topology, redundant_experts: int, format: WeightFormat
) -> int:
    """Elements, on one rank, of a tensor or of all experts' tensors of one name."""
    name, count = spec.name, spec.num_elements
    if name.endswith(BIASES):
        slots, experts = spec.shape[0] + redundant_experts, spec.shape[0]
        part = count // experts
        if name.endswith(GATE_UP_BIAS):
            part = _largest_part(config, part, topology, format)
        return slots // topology.ep_size * part
    if spec.copies > 1:
        slots = (spec.copies + redundant_experts) // topology.ep_size
        return slots * _largest_part(config, count, topology, format)
    return -(-count // _parts(config, name, topology))


def _of_whole_groups(config: ModelConfig, format: WeightFormat, topology: Topology) -> WeightFormat:
    """The format with experts dequantized if a rank's part splits groups with a scale, or in FP8 without a gate."""
    if config.moe is None or not isinstance(format, SchemeFormat | BlockFP8Format) or "experts" not in format.kept:
        return format
    splits = _largest_part(config, config.moe.width, topology, format) % _width_group(config, format)
    several = isinstance(format, GGUFFormat)  # forms of codes, which kernels take by matrix
    splits |= config.moe.squared and experts_format(config) is None and not several
    return replace(format, kept=format.kept - {"experts"}) if splits else format


def _width_group(config: ModelConfig, format: WeightFormat) -> int:
    return width_group(config, isinstance(format, SchemeFormat | BlockFP8Format) and "experts" in format.kept)


def _largest_part(config: ModelConfig, count: int, topology: Topology, format: WeightFormat) -> int:
    """The most of `count` elements of an expert on a rank: the first one's."""
    assert config.moe is not None
    width, ranks, group = config.moe.width, topology.moe_tp_size, _width_group(config, format)
    cut = Share(0, ranks).cut_in_groups(width, group) if group > 1 and width % ranks == 0 else None
    return count // ranks if cut is None else count // width * cut.stop


def is_shared(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is of the shared experts, or of their gate. Gemma 4's are a layer's MLP beside its experts."""
    names = expert_names(config)
    if not names.shared and config.moe is not None:
        return f".{names.block}." in name and ".experts." not in name
    parts = filter(None, (names.shared, names.shared_gate.removesuffix(".weight")))
    return any(f".{part}." in name for part in parts)


def _parts(config: ModelConfig, name: str, topology: Topology) -> int:
    """Number of equal parts that a tensor is sharded into."""
    if name.startswith(VISION):
        return 1
    if name == EMBEDDING:
        return topology.attn_tp_size
    if is_head(name) or name == HEAD_BIAS:
        return topology.attn_tp_size if topology.enable_dp_lm_head else topology.tp_size
    if is_shared(config, name):
        if topology.travels or ".shared_expert_gate." in name:
            return 1
        moe = config.moe_of(layer_index(name))
        shared = moe is not None and moe.num_shared_slots(topology.ep_size)
        return topology.moe_tp_size if shared else topology.tp_size
    if has_state(config, name):
        delta = config.delta
        whole = () if delta is None else _WHOLE_OF_ADDITIVE if delta.additive else _WHOLE_OF_DELTA
        return 1 if name.endswith(whole) else topology.attn_tp_size
    if name.endswith(".routed_expert_up_proj.weight"):
        return 1 if topology.travels else topology.tp_size
    if ".self_attn." in name:
        return _attention_parts(config, name, topology.attn_tp_size)
    return topology.tp_size if ".mlp." in name and topology.cuts_dense else 1


def _attention_parts(config: ModelConfig, name: str, attn_tp_size: int) -> int:
    """Projections from and to heads are sharded; those from and to the latent, and inner norms, are not."""
    part = name.rpartition(".self_attn.")[2].partition(".")[0]
    if part in ("k_proj", "v_proj", "index_q_proj"):  # with fewer KV heads than ranks, each is replicated
        attention = config.attention_of(layer_index(name))
        return min(attn_tp_size, attention.num_kv_heads)  # type: ignore[union-attr]
    if part == "o_b_proj" and isinstance(a := config.attention, CompressedConfig):
        return min(attn_tp_size, a.output_groups)
    return attn_tp_size if part in ("q_proj", "q_b_proj", "kv_b_proj", "o_proj", "o_a_proj", "g_proj") else 1
