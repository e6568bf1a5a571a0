"""Resolves the flags of LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_engine.config.args import EngineArgs
from moe_engine.config.lora import LoraEntry, lora_entries
from moe_engine.errors import ConfigError
from moe_engine.kernels.lora.choice import choose_lora
from moe_engine.models import registry
from moe_engine.models.config import ModelConfig
from moe_engine.models.lora_adapter import TARGETS, Adapter, linear_shapes, read_adapter
from moe_engine.parallel.topology import Topology
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.resolution_log import Record
from moe_engine.types.step_settings import LoraAdapter, LoraSettings

ALL = "all"
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter of --lora-paths that fits the model."""

    entry: LoraEntry
    adapter: Adapter


def is_enabled(args: EngineArgs) -> bool:
    return args.lora.enable_lora or args.lora.lora_paths is not None


def why_not_captured(args: EngineArgs, topology: Topology) -> str | None:
    """Why a launch with adapters captures no decodes, or None."""
    if not is_enabled(args):
        return None
    if args.lora.lora_backend == "torch_native":
        return "--lora-backend torch_native reads the adapters of a step on the host"
    if topology.attn_tp_size > 1 and (topology.travels or not topology.cuts_dense):
        return "not available yet with --enable-lora where a rank computes feed-forward layers for a part of its tokens"
    return None


def read_adapters(args: EngineArgs, model: ModelConfig) -> list[NamedAdapter]:
    """Reads the headers of the adapters of --lora-paths. Raises as `read_adapter`, with the flag in front."""
    found = []
    for entry in lora_entries(args.lora.lora_paths):
        try:
            found.append(NamedAdapter(entry, read_adapter(entry.path, model)))
        except ConfigError as error:
            raise type(error)(f"--lora-paths {entry.name}: {error}") from None
    return found


def resolve_lora(
    args: EngineArgs,
    model: ModelConfig,
    machine: Machine,
    topology: Topology,
    dtype: str,
    adapters: Sequence[NamedAdapter],
    record: Record,
) -> LoraSettings | None:
    """None without LoRA.

    Raises:
        ConfigError: names the flag and the fix.
    """
    flags = args.lora
    if not is_enabled(args):
        return None
    record.note("enable_lora", True, "--lora-paths") if not flags.enable_lora else None
    for complaint in _excluded(args, model):
        raise ConfigError(complaint)
    targets = _targets(args, model, adapters, record)
    rank = _rank(args, adapters, record)
    _check_groups(model, topology, targets)
    pinned = sum(named.entry.pinned for named in adapters)
    if flags.max_loras_per_batch < 1:
        raise ConfigError(f"--max-loras-per-batch {flags.max_loras_per_batch}: it must be at least 1")
    if pinned >= flags.max_loras_per_batch:
        raise ConfigError(
            f"--lora-paths: {pinned} pinned adapters leave no slot for others (--max-loras-per-batch "
            f"{flags.max_loras_per_batch}); pin fewer, or raise it"
        )
    if flags.max_loaded_loras is not None and flags.max_loaded_loras < max(1, len(adapters)):
        raise ConfigError(
            f"--max-loaded-loras {flags.max_loaded_loras} is less than the {len(adapters)} adapters of --lora-paths; "
            "raise it, or leave it out"
        )
    backend = "torch" if flags.lora_backend == "torch_native" else flags.lora_backend or "auto"
    try:
        choice = choose_lora(machine.device, dtype, backend)
    except ValueError as error:
        raise ConfigError(f"--lora-backend {flags.lora_backend}: {error}") from None
    if backend == "auto":
        record.note("lora_backend", choice.row.name, choice.reason)
    loaded = tuple(
        LoraAdapter(number, named.entry.name, str(named.adapter.path.resolve()), named.entry.pinned)
        for number, named in enumerate(adapters, 1)
    )
    return LoraSettings(flags.max_loras_per_batch, rank, targets, backend, flags.max_loaded_loras, loaded)


def _excluded(args: EngineArgs, model: ModelConfig) -> Iterator[str]:
    if not registry.is_built_in(model.architecture):
        yield f"--enable-lora: {model.architecture} is a model from outside; adapters need a built-in architecture"
    if model.pooling is not None:
        yield f"--enable-lora: not available yet for vectors ({model.source} is served for vectors); leave it out"
    if model.shortcut:
        yield f"--enable-lora: not available yet for {model.architecture}, whose layers are pairs; leave it out"
    if args.parallel.enable_two_batch_overlap:
        yield "--enable-two-batch-overlap with --enable-lora: not available yet; drop one"
    if args.backends.enable_torch_compile:
        yield "--enable-torch-compile with --enable-lora: compiled layers have no adapters; drop one"


def _targets(args: EngineArgs, model: ModelConfig, adapters: Sequence[NamedAdapter], record: Record) -> tuple[str, ...]:
    asked, used = args.lora.lora_target_modules, {target for named in adapters for target in named.adapter.targets}
    present = {name.rpartition(".")[2] for name in linear_shapes(model)}
    if asked is None:
        if not used:
            raise ConfigError(
                "--enable-lora without --lora-paths needs --lora-target-modules (such as q_proj v_proj, or all) and "
                "--max-lora-rank, so that adapters loaded later fit"
            )
        chosen = tuple(name for name in TARGETS if name in used)
        record.note("lora_target_modules", " ".join(chosen), "those of --lora-paths")
        return chosen
    words = asked.replace(",", " ").split()
    wanted = present if ALL in words else set(words)
    for word in wanted:
        if word not in present:
            able = ", ".join(name for name in TARGETS if name in present)
            raise ConfigError(
                f"--lora-target-modules {word}: {model.architecture} has no such module for adapters; it has {able}"
            )
    if missing := sorted(used - wanted):
        raise ConfigError(
            f"--lora-target-modules {asked}: the adapters of --lora-paths also have {', '.join(missing)}; add these"
        )
    return tuple(name for name in TARGETS if name in wanted)


def _rank(args: EngineArgs, adapters: Sequence[NamedAdapter], record: Record) -> int:
    asked, largest = args.lora.max_lora_rank, max((named.adapter.rank for named in adapters), default=0)
    if asked is None:
        if not largest:
            raise ConfigError("--enable-lora without --lora-paths needs --max-lora-rank, so that later adapters fit")
        return record.note("max_lora_rank", largest, "the largest of --lora-paths")
    if asked < max(1, largest):
        raise ConfigError(f"--max-lora-rank {asked}: an adapter of --lora-paths has rank {largest}; use at least that")
    return asked


def _check_groups(model: ModelConfig, topology: Topology, targets: Sequence[str]) -> None:
    """With DP attention each group has its own slots, so a rank must not compute the tokens of other groups."""
    if topology.attn_dp_size == 1 or not set(targets).intersection(FEED_FORWARD):
        return
    fixes = []
    if topology.cuts_dense and not all(model.moe_layers):
        fixes.append("--moe-dense-tp-size 1")
    if not topology.travels and model.moe is not None and model.moe.shared_width and any(model.moe_layers):
        fixes.append("an --moe-a2a-backend")
    if fixes:
        raise ConfigError(
            f"--attn-dp-size {topology.attn_dp_size}: adapters of feed-forward layers (gate_proj, up_proj, down_proj) "
            f"need {' and '.join(fixes)}, so that a rank computes tokens of its own group only; or leave these modules "
            "out of --lora-target-modules"
        )
