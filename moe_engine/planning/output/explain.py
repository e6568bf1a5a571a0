"""Output of ``--explain``: every resolved value with its reason, the memory ledger, kernels and rejected kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

from moe_engine.config.args import PARTS
from moe_engine.config.field import fields_of
from moe_engine.config.flags import GROUPS
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.memory.ledger import gb
from moe_engine.planning.resolved_config import ResolvedConfig


@dataclasses.dataclass(frozen=True)
class Value:
    """A line of the explanation. origin: ``given``, ``auto`` or ``default``; `reason` is set for auto."""

    name: str
    value: Any
    origin: str
    reason: str = ""


def values_of(config: ResolvedConfig) -> dict[str, list[Value]]:
    """Every field, by group, with its resolved value."""
    decided = {decision.name: decision.reason for decision in config.decisions}
    values = config.flat()
    found: dict[str, list[Value]] = {}
    for part in PARTS.values():
        group = found.setdefault(GROUPS[part.__name__], [])
        for info in fields_of(part):
            name = info.name
            origin = "auto" if name in decided else "given" if name in config.args.given else "default"
            group.append(Value(name, values[name], origin, decided.get(name, "")))
    return found


def explain_text(config: ResolvedConfig) -> str:
    """The explanation as aligned text."""
    lines = [f"{config.served_model_name} ({config.model.architecture}) on {config.machine.device.name}", ""]
    groups = values_of(config)
    names = max(len(value.name) for group in groups.values() for value in group)
    for group, values in groups.items():
        lines.append(f"{group}:")
        width = min(32, max(len(_text(value.value)) for value in values))
        for value in values:
            origin = f"auto: {value.reason}" if value.origin == "auto" else value.origin
            lines.append(f"  {value.name:<{names}}  {_text(value.value):<{width}}  {origin}")
    lines += ["", "memory:", *(f"  {line}" for line in config.ledger.lines())]
    lines += ["", "requests:", *(f"  {name}: {value}" for name, value in facts_of(config).items())]
    lines += ["", "kernels:"]
    for family, backend, reason, refused in _choices(config):
        lines.append(f"  {family:<10}  {backend:<10}  {reason}")
        lines += [f"  {'':<10}  not {name}: {why}" for name, why in refused.items()]
    if config.notes:
        lines += ["", "notes:", *(f"  {note}" for note in config.notes)]
    return "\n".join(lines)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def facts_of(config: ResolvedConfig) -> dict[str, int]:
    """Limits of a request that follow from the configuration."""
    tier = {"host_tier_tokens": config.host_tier_tokens} if config.host_tier_tokens else {}
    states = {"host_snapshots": config.host_snapshots} if config.host_snapshots else {}
    if config.host_window_slots:
        tier["host_window_slots"] = config.host_window_slots
    windows = {"swa_max_total_num_tokens": config.num_window_slots} if config.num_window_slots else {}
    return {
        **tier,
        **states,
        **windows,
        "max_total_num_tokens": config.max_total_num_tokens,
        "max_req_len": config.max_req_len,
        "max_req_input_len": config.max_req_input_len,
        "kv_bytes_per_token": config.ledger.bytes_per_token,
    }


def _choices(config: ResolvedConfig) -> list[tuple[str, str, str, dict[str, str]]]:
    """(family, backend, reason, reasons against the others) of the kernels, and of the dispatcher if there is one."""
    found = [
        (choice.family, choice.row.name, choice.reason, dict(choice.refused)) for choice in config.kernels.model.choices
    ]
    dispatch = config.parallel.dispatch
    if dispatch is not None:
        found.append(("dispatch", dispatch.row.name, dispatch.reason, dispatch.refused))
    return found


def _machine_json(machine: Machine) -> dict[str, Any]:
    device = vars(machine.device)
    more = {name: device[name] for name in ("capability", "compiler", "elsewhere", "has_libraries")}
    return vars(machine) | {"device": device["kind"], "device_name": device["name"]} | more


def explain_json(config: ResolvedConfig) -> dict[str, Any]:
    """The explanation as JSON. Sizes are bytes."""
    ledger = config.ledger
    return {
        "model": {"path": config.model_path, "architecture": config.model.architecture},
        "machine": _machine_json(config.machine),
        "values": {
            value.name: {"value": value.value, "origin": value.origin, "reason": value.reason}
            for values in values_of(config).values()
            for value in values
        },
        "memory": {
            "rows": [dataclasses.asdict(row) for row in ledger.all_rows()],
            "host_rows": [dataclasses.asdict(row) for row in ledger.host_rows],
            "total_bytes": ledger.total_bytes,
            "limit_bytes": ledger.limit_bytes,
            "limit_reason": ledger.limit_reason,
        },
        "requests": facts_of(config),
        "kernels": [
            {"family": family, "backend": backend, "reason": reason, "refused": refused}
            for family, backend, reason, refused in _choices(config)
        ],
        "notes": list(config.notes),
    }


def start_lines(config: ResolvedConfig) -> list[str]:
    """Lines that the start logs: the flags as SGLang's line has them, the memory ledger and remarks."""
    flags = ", ".join(f"{name}={value!r}" for name, value in config.flat().items())
    lines = [
        f"server_args=ServerArgs({flags})",
        f"Memory ledger: {gb(config.ledger.total_bytes)} of {gb(config.ledger.limit_bytes)}",
    ]
    lines += [f"  {line}" for line in config.ledger.lines()]
    return lines + [f"Note: {note}" for note in config.notes]
