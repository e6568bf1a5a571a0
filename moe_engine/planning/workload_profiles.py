"""``--workload-profile``: the values that tuning guides recommend for a kind of load, for flags that the user did not
set.

A choice that the other flags, the model or the machine exclude is left out, with a remark that has the reason.
Numerics never change: a profile sets no data type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from moe_engine.config.args import PARTS, EngineArgs
from moe_engine.config.field import fields_of, option_of
from moe_engine.errors import MoeEngineError
from moe_engine.models.config import ModelConfig
from moe_engine.planning.resolution_log import Decision
from moe_engine.planning.resolved_config import ResolvedConfig

Resolve = Callable[[EngineArgs], ResolvedConfig]


@dataclass(frozen=True)
class Choice:
    """A flag's value in a profile. `on_cpu` None: unchanged on a CPU. `with_flags`: flags that are set together with
    it, all or none."""

    flag: str
    value: Any
    reason: str
    on_cpu: Any = None
    with_flags: tuple[tuple[str, Any], ...] = ()

    def flags(self, device: str) -> dict[str, Any]:
        """Empty on a device for which the choice has no value."""
        value = self.on_cpu if device == "cpu" else self.value
        return {} if value is None else {self.flag: value, **dict(self.with_flags)}


def same(flag: str, value: Any, reason: str, *with_flags: tuple[str, Any]) -> Choice:
    """A choice for every device."""
    return Choice(flag, value, reason, on_cpu=value, with_flags=with_flags)


MTP = "drafts of the model's MTP layers; their depth is measured and chosen for each step"
BESIDE = "running requests get a token in every step, also during the chunks of a prompt"
LPM = "requests with a cached prefix come first, before it is evicted"
PROFILES: dict[str, tuple[Choice, ...]] = {
    "low-latency": (
        same("speculative_algorithm", "NEXTN", MTP, ("speculative_num_steps", "auto")),
        Choice("chunked_prefill_size", 2048, "short steps: running requests wait less for prompts", on_cpu=512),
        same("enable_mixed_chunk", True, BESIDE),
        Choice("max_running_requests", 48, "a step's time grows with every request; others wait", on_cpu=16),
    ),
    "throughput": (
        Choice("chunked_prefill_size", 16384, "fewer and larger prefill steps"),
        Choice("cuda_graph_max_bs_decode", 512, "large batches are replayed too (guide: up to 512)"),
        same("schedule_policy", "lpm", LPM),
        same("stream_interval", 8, "a chunk of an answer has 8 tokens: an eighth of the messages to clients"),
    ),
    "long-context": (
        Choice("chunked_prefill_size", 4096, "small activations: their memory goes to the KV cache"),
        Choice("max_running_requests", 64, "slot tables and graphs for few requests; the KV cache gets the rest",
               on_cpu=32),
        same("schedule_conservativeness", 1.3, "a retracted long prompt is computed again: reserve more for answers"),
        same("enable_mixed_chunk", True, BESIDE),
    ),
    "multi-turn": (
        same("schedule_policy", "lpm", LPM),
        Choice("enable_hierarchical_cache", True, "conversations that pause stay in host RAM"),
        same("schedule_conservativeness", 1.3, "fewer retractions, which drop the KV of a conversation"),
    ),
}  # fmt: skip


def resolve_profile(args: EngineArgs, model: ModelConfig, device: str, resolve: Resolve) -> ResolvedConfig:
    """The configuration with the choices of --workload-profile, each with its reason; without a profile, `resolve`'s.

    Raises:
        ConfigError: as `resolve`, for the flags as given.
    """
    profile = args.scheduling.workload_profile
    if profile is None:
        return resolve(args)
    config, reasons, remarks = resolve(args), dict[str, str](), list[str]()
    for choice in PROFILES[profile]:
        wanted = choice.flags(device)
        if not wanted or choice.flag in args.given:
            continue
        changed = {name: value for name, value in wanted.items() if name not in args.given}
        why = excluded(choice, args, model)
        if why is None:
            try:
                config = resolve(candidate := _with(args, changed))
            except MoeEngineError as error:
                why = str(error)
            else:
                args = candidate
                reasons.update(dict.fromkeys(changed, f"--workload-profile {profile}: {choice.reason}"))
        if why is not None:
            remarks.append(f"--workload-profile {profile}: without {option_of(choice.flag)}: {why}")
    return dataclasses.replace(config, decisions=tuple(_decisions(config, reasons)), notes=(*config.notes, *remarks))


def excluded(choice: Choice, args: EngineArgs, model: ModelConfig) -> str | None:
    """The reason why a choice would have no effect or do harm here, beyond the cases that `resolve` refuses."""
    if choice.flag == "speculative_algorithm" and not model.num_nextn_predict_layers:
        return "the model has no MTP layers"
    if choice.flag == "speculative_algorithm" and model.own_block is not None:
        return "the model's draft layers fill in blocks: --speculative-algorithm DSPARK"
    if choice.flag == "schedule_policy" and args.scheduling.enable_priority_scheduling:
        return "--enable-priority-scheduling orders the queue"
    if choice.flag == "enable_mixed_chunk" and args.memory.chunked_prefill_size == -1:
        return "--chunked-prefill-size -1 makes no chunks"
    if choice.flag == "max_running_requests" and args.memory.max_total_tokens is not None:
        return f"--max-total-tokens {args.memory.max_total_tokens} bounds the requests"
    return None


def _with(args: EngineArgs, values: dict[str, Any]) -> EngineArgs:
    """The flags with these values, which do not count as given by the user."""
    parts = {}
    for name, part in PARTS.items():
        own = {info.name: values[info.name] for info in fields_of(part) if info.name in values}
        parts[name] = dataclasses.replace(getattr(args, name), **own)
    return dataclasses.replace(args, **parts)


def _decisions(config: ResolvedConfig, reasons: dict[str, str]) -> Iterator[Decision]:
    """The decisions of `config`, and those of the profile with their resolved values."""
    values = config.flat()
    noted = set()
    for decision in config.decisions:
        noted.add(decision.name)
        profile = reasons.get(decision.name)
        reason = decision.reason if profile is None else f"{profile}; {decision.reason}"
        yield dataclasses.replace(decision, reason=reason)
    yield from (Decision(name, values[name], reason) for name, reason in reasons.items() if name not in noted)
