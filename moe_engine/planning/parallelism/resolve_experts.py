"""Resolves the flags of expert placement, EPLB and recording to `ExpertSettings`; errors name the fix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from moe_engine.config.args import EngineArgs
from moe_engine.config.experts import ExpertArgs
from moe_engine.config.field import fields_of
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.parallel.expert_settings import ExpertSettings, RebalanceSettings
from moe_engine.parallel.placement.policies import resolve_policy
from moe_engine.parallel.recording.config import check_mode
from moe_engine.parallel.topology import Topology
from moe_engine.planning.resolution_log import Record

ONE_RANK = Topology()


def resolve_experts(
    args: EngineArgs, model: ModelConfig, record: Record, topology: Topology, dump_directory: Path
) -> ExpertSettings:
    """Pure, except for a check that the file of --init-expert-location exists; ranks read it themselves.

    Raises:
        ConfigError: naming the flag and the fix.
    """
    flags = args.experts
    if model.moe is None or not model.is_moe:
        asked = [info.option for info in fields_of(ExpertArgs) if getattr(flags, info.name) != info.default]
        asked += ["--enable-return-routed-experts"] * args.server.enable_return_routed_experts
        if asked:
            named = ", ".join(sorted(asked))
            raise ConfigError(f"{named}: {model.architecture} has no experts; leave it out")
        return ExpertSettings()
    _check(flags, topology)
    reports = "both" if flags.enable_expert_distribution_metrics else flags.expert_balancedness_report_mode
    settings = ExpertSettings(
        num_redundant=flags.ep_num_redundant_experts,
        location=flags.init_expert_location,
        dispatch=_dispatch(flags, topology, record),
        recorder_mode=_mode(flags, reports, record),
        buffer_size=_buffer_size(flags),
        directory=dump_directory,
        report_log=reports in ("server_log", "both"),
        report_metrics=reports in ("prometheus", "both"),
        rebalance=_rebalance(flags, args.scheduling.autopilot),
        policy=flags.eplb_algorithm,
        returned=args.server.enable_return_routed_experts,
    )
    for problem in _returned_problems(args, topology, settings) if settings.returned else ():
        raise ConfigError(f"--enable-return-routed-experts: not available yet with {problem}; leave one out")
    layout = settings.layout(model.moe.num_experts, model.moe.num_groups, topology)
    resolve_policy(flags.eplb_algorithm, layout)
    if settings.recorder_mode is not None:
        check_mode(settings.recorder_mode, model.moe.top_k, settings.buffer_size)
    return settings


def _returned_problems(args: EngineArgs, topology: Topology, settings: ExpertSettings) -> Iterator[str]:
    algorithm = args.speculative.speculative_algorithm
    if algorithm:
        yield f"--speculative-algorithm {algorithm} (experts of drafts would have to be removed)"
    if args.parallel.enable_two_batch_overlap:
        yield "--enable-two-batch-overlap (steps are cut in two)"
    if args.server.enable_return_hidden_states:
        yield "--enable-return-hidden-states (a request returns one of both)"
    if settings.places_experts or settings.recorder_mode is not None:
        yield (
            "placed, moved or recorded experts (--init-expert-location, --ep-num-redundant-experts, --enable-eplb, "
            "--expert-distribution-recorder-mode)"
        )
    if topology.attn_dp_size > 1 and not topology.travels:
        yield "--attn-dp-size above 1 without --moe-a2a-backend (every rank routes the tokens of all groups)"
    if topology.travels and topology.attn_tp_size > 1:
        yield "--moe-a2a-backend and attention groups of several ranks (each routes a part of the tokens)"
    if args.memory.enable_hierarchical_cache or args.disaggregation.disaggregation_mode != "null":
        yield "--enable-hierarchical-cache and --disaggregation-mode (loaded KV has no experts)"


def _check(flags: ExpertArgs, topology: Topology) -> None:
    if flags.enable_eplb and topology.ep_size == 1:
        raise ConfigError(
            "--enable-eplb moves experts between ranks, and --ep-size is 1: use --ep-size above 1, or leave it out"
        )
    if not 0 <= flags.eplb_min_rebalancing_utilization_threshold <= 1:
        raise ConfigError(
            "--eplb-min-rebalancing-utilization-threshold "
            f"{flags.eplb_min_rebalancing_utilization_threshold:g}: must be a balancedness, between 0 and 1"
        )
    location = flags.init_expert_location
    if location != "trivial" and not location.lstrip().startswith("{"):
        if not location.endswith((".pt", ".json")):
            raise ConfigError(
                f"--init-expert-location {location}: give trivial, a .pt or .json file, or JSON that starts with {{"
            )
        if not os.path.isfile(location):
            raise ConfigError(f"--init-expert-location {location}: no such file")


def _dispatch(flags: ExpertArgs, topology: Topology, record: Record) -> str:
    asked = flags.ep_dispatch_algorithm
    if asked == "static" and not topology.travels and topology.ep_size > 1 and flags.ep_num_redundant_experts:
        raise ConfigError(
            "--ep-dispatch-algorithm static chooses replicas per rank; without --moe-a2a-backend all ranks process all "
            "tokens and must choose alike: use dynamic, or a --moe-a2a-backend"
        )
    if asked is not None:
        return asked
    chosen = "static" if topology.travels else "dynamic"
    if flags.ep_num_redundant_experts:
        reason = "each rank dispatches its own tokens"
        if not topology.travels:
            reason = "all ranks process all tokens and must choose the same replicas"
        record.note("ep_dispatch_algorithm", chosen, reason)
    return chosen


def _mode(flags: ExpertArgs, reports: str, record: Record) -> str | None:
    asked = flags.expert_distribution_recorder_mode
    if asked is not None or not (flags.enable_eplb or reports != "off"):
        return asked
    reason = f"needed by {'--enable-eplb' if flags.enable_eplb else '--expert-balancedness-report-mode'}"
    return record.note("expert_distribution_recorder_mode", "stat", reason)


def _buffer_size(flags: ExpertArgs) -> int:
    asked = flags.expert_distribution_recorder_buffer_size
    return flags.eplb_rebalance_num_iterations if asked is None else asked


def _rebalance(flags: ExpertArgs, adaptive: bool) -> RebalanceSettings | None:
    if not flags.enable_eplb:
        return None
    return RebalanceSettings(
        interval=flags.eplb_rebalance_num_iterations,
        layers_at_once=flags.eplb_rebalance_layers_per_chunk or 1,
        enough=flags.eplb_min_rebalancing_utilization_threshold,
        adaptive=adaptive,
    )
