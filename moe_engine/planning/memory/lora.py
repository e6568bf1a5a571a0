"""Ledger rows of the slots of LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator

from moe_engine.models.config import GQAConfig, ModelConfig
from moe_engine.models.lora_adapter import linear_shapes
from moe_engine.models.sizes import is_shared
from moe_engine.models.tensors.model import layer_index
from moe_engine.parallel.topology import Topology
from moe_engine.planning.memory.ledger import LORA_HOST_ROW, LORA_ROW, LedgerRow
from moe_engine.planning.model.resolve_lora import FEED_FORWARD
from moe_engine.types.step_settings import LoraSettings

MERGED = (
    ("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("q_b_proj",), ("kv_b_proj",), ("o_proj",),
    ("gate_proj", "up_proj"), ("down_proj",),
)  # fmt: skip
"""Projections that may be one product: their slots are allocated together."""


def lora_rows(
    settings: LoraSettings | None, model: ModelConfig, topology: Topology, dtype_bytes: int, device: str
) -> list[LedgerRow]:
    """Ledger rows of one rank: the slots, and on a CPU the loaded adapters, which share its memory."""
    if settings is None:
        return []
    each = slot_bytes(settings, model, topology, dtype_bytes)
    detail = f"{settings.num_slots} slots of rank {settings.rank} for {', '.join(settings.targets)}"
    rows = [LedgerRow(LORA_ROW, settings.num_slots * each, detail)]
    if device == "cpu":
        count = settings.max_loaded or max(len(settings.adapters), settings.num_slots)
        rows.append(LedgerRow(LORA_HOST_ROW, count * each, f"{count} adapters, in memory while they have no slot"))
    return rows


def slot_bytes(settings: LoraSettings, model: ModelConfig, topology: Topology, dtype_bytes: int) -> int:
    """Bytes of one slot on one rank; as `LoraLayers.num_bytes`, if q and kv_a are separate products."""
    return dtype_bytes * sum(
        _product_elements(settings, names, dict(group), model, topology)
        for group in _modules_by_block(model)
        for names in _products(model)
    )


def _products(model: ModelConfig) -> Iterator[tuple[str, ...]]:
    for names in MERGED:
        if names[0] == "q_proj" and not isinstance(model.attention, GQAConfig):
            yield ("q_proj",)
        else:
            yield names


def _modules_by_block(model: ModelConfig) -> Iterator[list[tuple[str, tuple[str, int, int]]]]:
    """The modules of each attention and feed-forward block, by target: (name, N, K)."""
    blocks: dict[str, list[tuple[str, tuple[str, int, int]]]] = {}
    for name, (rows, columns) in linear_shapes(model).items():
        block, _, target = name.rpartition(".")
        blocks.setdefault(block, []).append((target, (name, rows, columns)))
    yield from blocks.values()


def _product_elements(
    settings: LoraSettings,
    names: tuple[str, ...],
    block: dict[str, tuple[str, int, int]],
    model: ModelConfig,
    topology: Topology,
) -> int:
    parts = [name for name in names if name in block]
    if not set(parts).intersection(settings.targets):
        return 0
    widths = [_local_shape(name, *block[name], model, topology) for name in parts]
    b = sum(rows for rows, _ in widths) * (2 if parts == ["kv_b_proj"] else 1)
    return settings.rank * (len(parts) * widths[0][1] + b)


def _local_shape(
    target: str, name: str, rows: int, columns: int, model: ModelConfig, topology: Topology
) -> tuple[int, int]:
    """N and K of a module on one rank."""
    attention = model.attention_of(layer_index(name))
    if target in FEED_FORWARD:
        whole = topology.travels if is_shared(model, name) else not topology.cuts_dense
        ranks = 1 if whole else topology.tp_size
    elif target in ("q_a_proj", "kv_a_proj_with_mqa"):
        ranks = 1
    elif target in ("k_proj", "v_proj") and isinstance(attention, GQAConfig):
        ranks = min(topology.attn_tp_size, attention.num_kv_heads)
    else:
        ranks = topology.attn_tp_size
    return (rows, columns // ranks) if target in ("o_proj", "down_proj") else (rows // ranks, columns)
