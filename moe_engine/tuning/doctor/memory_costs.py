"""Memory that a change of a flag costs: the ledger of the launch with the change minus the ledger without it.

The ledger needs the model's config. If its folder is not on this machine (a log of another machine), costs are
estimated from the sizes in the log, as far as possible.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_engine.config.args import EngineArgs
from moe_engine.config.field import option_of
from moe_engine.errors import MoeEngineError
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.memory.ledger import MemoryLedger, gb
from moe_engine.tuning.doctor.diagnosis import Cost
from moe_engine.tuning.doctor.launch import SHARED, Launch
from moe_engine.tuning.doctor.rules import Change
from moe_engine.tuning.doctor.window import Statistics
from moe_engine.tuning.hardware.table import find_gpu

GIB = 2**30
OF_THE_LEDGER = (
    "model_path", "load_format", "dtype", "quantization", "context_length", "json_model_override_args", "device",
    "tp_size", "dp_size", "attn_dp_size", "enable_dp_attention", "ep_size", "moe_a2a_backend", "chunked_prefill_size",
    "max_prefill_tokens", "max_running_requests", "page_size", "kv_cache_dtype", "disable_cuda_graph",
    "cuda_graph_max_bs", "cuda_graph_max_bs_decode", "enable_eplb", "ep_num_redundant_experts",
    "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
)  # fmt: skip
"""Flags of a log or of /server_info that the ledger reads. The KV cache gets the rest of the memory, as at a start."""
SIZED = frozenset(map(option_of, (*OF_THE_LEDGER, "mem_fraction_static", "max_total_tokens"))) - {"--model-path"}
"""Flags whose change may change the ledger."""
NO_MEMORY = Cost("no memory: the ledger has no row that depends on this flag", 0)


class LedgerCosts:
    """Costs of changes to a launch whose flags and machine are known.

    Args:
        args: the flags as given.
        machine: its state before the start.
    """

    def __init__(self, args: EngineArgs, machine: Machine | None) -> None:
        self._args, self._machine = args, machine
        self._found: dict[Change, Cost] = {}

    def of(self, change: Change, statistics: Statistics) -> Cost | None:
        if change.flag not in SIZED:
            return NO_MEMORY
        if change not in self._found:
            self._found[change] = self._cost(change)
        return self._found[change]

    @cached_property
    def _now(self) -> MemoryLedger:
        return self._ledger(self._args)

    def _cost(self, change: Change) -> Cost:
        name = change.flag.lstrip("-").replace("-", "_")
        try:
            before, after = self._now, self._ledger(_changed(self._args, name, change.value))
        except MoeEngineError as error:
            return Cost(f"unknown: {error}")
        return difference(before, after)

    def _ledger(self, args: EngineArgs) -> MemoryLedger:
        from moe_engine.planning.prepare import prepare

        return prepare(args, self._machine).ledger


def _changed(args: EngineArgs, name: str, value: Any) -> EngineArgs:
    """Raises ConfigError: the value is refused."""
    if value is not None:
        return args.replace(**{name: value})
    kept = {key: kept for key, kept in args.flat().items() if key in args.given and key != name}
    return EngineArgs.from_kwargs(**kept)


def difference(before: MemoryLedger, after: MemoryLedger) -> Cost:
    """Difference in the rows of the ledger, and in the tokens of the KV cache."""
    names = dict.fromkeys(row.name for ledger in (before, after) for row in ledger.rows)
    changed = {name: after.bytes_of(name) - before.bytes_of(name) for name in names}
    parts = [f"{name} {_signed(size)}" for name, size in changed.items() if size]
    if before.num_tokens != after.num_tokens or before.bytes_per_token != after.bytes_per_token:
        parts.append(f"KV cache {_signed(after.kv_bytes - before.kv_bytes)} ({before.num_tokens} -> {after.num_tokens}")
        parts[-1] += " tokens)"
    total = after.total_bytes - before.total_bytes
    if not parts:
        return Cost("no memory: the ledger stays the same", 0)
    return Cost(f"{_signed(total)} on each rank: {', '.join(parts)}", total)


def _signed(size: int) -> str:
    return f"{'+' if size >= 0 else '-'}{gb(abs(size))}"


class ReportedCosts:
    """Costs from the values that a log or another engine's server reports: by the ledger if the model's folder is on
    this machine."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def of(self, change: Change, statistics: Statistics) -> Cost | None:
        if change.flag not in SIZED:
            return NO_MEMORY
        if (known := self._reported(change)) is not None:
            return known
        if (args := ledger_args(self._launch)) is None:
            return Cost("unknown: the ledger needs the model's folder on this machine, and the launch's server_args")
        machine = machine_of(self._launch)
        return LedgerCosts(args, machine).of(change, statistics)

    def _reported(self, change: Change) -> Cost | None:
        """Cost of flags that follows from the reported sizes; None: other flags, or sizes not reported."""
        launch = self._launch
        if change.flag == "--kv-cache-dtype" and launch.kv_tokens and launch.kv_gb:
            tokens = launch.kv_tokens
            return Cost(f"none: the {launch.kv_gb:.2f} GB hold up to {2 * tokens} instead of {tokens} tokens", 0)
        if change.flag == "--dp-size" and launch.weights_gb:
            size = launch.weights_gb * (int(change.value) - 1)
            return Cost(f"+{size:.2f} GB of weights on each GPU, which the KV cache loses", int(size * GIB))
        current, total = launch.flag("mem_fraction_static"), launch.total_gb
        if change.flag == "--mem-fraction-static" and isinstance(change.value, float) and current and total:
            size = (change.value - current) * total
            each = launch.bytes_per_token
            tokens_text = f", {abs(int(size * GIB / each))} tokens {'more' if size > 0 else 'fewer'}" if each else ""
            return Cost(f"{'+' if size >= 0 else '-'}{abs(size):.2f} GB for the KV cache{tokens_text}", int(size * GIB))
        return None


def ledger_args(launch: Launch) -> EngineArgs | None:
    """The flags of the ledger, as given on the command line; None if the model's folder is not here or a flag is not
    known."""
    flags = launch.flags
    path = flags.get("model_path")
    if not path or not Path(str(path)).is_dir():
        return None
    known = {name: flags[name] for name in OF_THE_LEDGER if flags.get(name) is not None}
    for name in SHARED:
        if (of_rank := launch.of_rank(name)) is not None and of_rank > 0 and name in known:
            known[name] = of_rank * launch.attention_ranks
    if "cuda_graph_max_bs_decode" in known:
        known.pop("cuda_graph_max_bs", None)
    if not known.get("speculative_algorithm"):
        known = {name: value for name, value in known.items() if not name.startswith("speculative")}
    try:
        return EngineArgs.from_kwargs(**known)
    except MoeEngineError:
        return None


def machine_of(launch: Launch) -> Machine | None:
    """A machine with the reported GPU memory; None: this one, for a server on a CPU."""
    if launch.flag("device") == "cpu" or not launch.total_gb:
        return None
    size = int(launch.total_gb * GIB)
    gpu = dataclasses.replace(find_gpu("h200"), name="the GPU of the log", memory_bytes=size)
    return gpu.machine(int(launch.flag("tp_size") or 1))
