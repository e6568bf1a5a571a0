"""Refuses impossible options of ``moe-engine simulate`` before anything is read or computed."""

from __future__ import annotations

import argparse
import math
from importlib.util import find_spec
from pathlib import Path

from moe_engine.cli.output_file import check_writable
from moe_engine.config.args import EngineArgs
from moe_engine.config.disaggregation import OFF
from moe_engine.errors import ConfigError
from moe_engine.kernels.host_memory import host_memory
from moe_engine.planning.inputs.machine import usable_cores
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.tuning import datasets, serving_report
from moe_engine.tuning.planner.given_form import OURS
from moe_engine.tuning.simulator.parts import LEAST_PART
from moe_engine.tuning.simulator.sessions import Recorded
from moe_engine.tuning.simulator.workload import Workload

MOST = 1e12
LEAST = {
    "agent_turns": 1, "agent_groups": 1, "agent_pause": 0, "recovery_seconds": 0, "restart_seconds": 0,
    "max_concurrency": 1, "expert_skew": 1, "expert_zipf": 0, "processes": 1,
}  # fmt: skip
AGENT_LENGTHS = {"agent_input_len": 1, "agent_output_len": 1, "agent_system_len": 0}
LARGE_PART = 2 * LEAST_PART
"""Least requests of a part by default. About a sixth of two such parts is simulated twice."""
TOKEN_BYTES = 31
"""Memory of a cached token (docs/simulate.md)."""
PICTURES = (".png", ".svg", ".pdf")


def check(own: argparse.Namespace) -> None:
    """Raises ConfigError: an option is impossible, alone or with others."""
    if (own.cost_file is None) == (own.hardware is None):
        raise ConfigError(
            "give either --cost-file FILE, which `moe-engine calibrate --output FILE` measures on this machine, or "
            "--hardware, for instance --hardware 8xH200"
        )
    for name in ("expert_skew", "expert_load", "expert_zipf"):
        if getattr(own, name) is not None and own.hardware is None:
            raise ConfigError(
                f"{_option(name)}: measured step costs contain the skew of the measurement; use --hardware in the "
                "place of --cost-file"
            )
    if own.interconnect is not None and own.hardware is None:
        raise ConfigError("--interconnect: only --hardware has a network; leave it out with --cost-file")
    if own.like != OURS and own.hardware is None:
        raise ConfigError(f"--like {own.like}: measured step costs are those of this engine; leave it out")
    _check_numbers(own)
    if own.dataset_name == "trace" and not own.dataset_path:
        raise ConfigError("--dataset-name trace needs --dataset-path FILE.jsonl")
    if own.dataset_name == "trace" and not math.isinf(own.request_rate):
        raise ConfigError(f"--request-rate {own.request_rate:g}: a trace has the times of its requests; leave it out")
    if own.arrivals != "poisson" and math.isinf(own.request_rate):
        raise ConfigError(f"--arrivals {own.arrivals} needs a finite --request-rate")
    if own.arrivals != "gamma" and own.burstiness != 1.0:
        raise ConfigError(f"--burstiness {own.burstiness:g}: only --arrivals gamma has it; add it, or leave this out")
    _check_output(own)


def check_launch(args: EngineArgs) -> None:
    """Raises ConfigError: the launch has parts that the simulation cannot leave out."""
    mode = args.disaggregation.disaggregation_mode
    if mode != OFF:
        raise ConfigError(
            f"--disaggregation-mode {mode}: a simulation has no transfers between servers; leave it out, or use "
            "`moe-engine plan --workload`, which compares prefill and decode servers"
        )
    for flag, given, reason in (
        ("--hicache-storage-backend", args.memory.hicache_storage_backend, "has no storage below the host-RAM tier"),
        ("--is-embedding", args.model.is_embedding, "generates answers"),
        ("--kv-connector", args.memory.kv_connector not in ("", "host") and args.memory.kv_connector, "has no copies"),
    ):
        if given:
            raise ConfigError(f"{flag}: a simulation {reason}; leave it out")


def num_processes(own: argparse.Namespace, config: ResolvedConfig, num_tokens: int, workload: Workload) -> int:
    """Processes of the simulation: `--processes`, or by default the cores, as far as the parts of the load are large
    and their KV caches fit into half of the free memory.

    Args:
        num_tokens: of all KV pools.

    Raises:
        ConfigError: the load cannot be simulated in `--processes` parts.
    """
    if own.processes is not None:
        reason = _refusal(own, config, workload, own.processes) if own.processes > 1 else None
        if reason is not None:
            raise ConfigError(f"--processes {own.processes}: {reason}; leave it out")
        return int(own.processes)
    if own.dataset_name.startswith("random") and not own.dataset_path:
        num_tokens = min(num_tokens, workload.total * (own.random_input_len + own.random_output_len))
    fitting = host_memory().available_bytes // (2 * TOKEN_BYTES * num_tokens)
    most = min(usable_cores(), workload.total // LARGE_PART, fitting)
    return most if most > 1 and _refusal(own, config, workload, most) is None else 1


def _refusal(own: argparse.Namespace, config: ResolvedConfig, workload: Workload, processes: int) -> str | None:
    """Why the load cannot be simulated in so many parts."""
    least, reason = processes * LEAST_PART, None
    if own.max_concurrency or own.dataset_name == "agentic" or (isinstance(workload, Recorded) and workload.waits):
        reason = "requests wait for answers, so that a part of them does not begin before the part before it has ended"
    elif own.dataset_name != "trace" and math.isinf(own.request_rate):
        reason = "all requests arrive together; give a --request-rate"
    elif config.scheduling.autopilot:
        reason = "--autopilot changes limits by all that it has seen"
    elif config.args.experts.enable_eplb and (own.expert_load is not None or own.expert_zipf is not None):
        reason = "--enable-eplb moves experts once, for the rest of the load"
    elif workload.total < least:
        reason = f"{workload.total} requests are too few, it takes {least}"
    return reason


def left_out(own: argparse.Namespace, config: ResolvedConfig) -> list[str]:
    """Flags of the launch, and what the simulation leaves out of their effect."""
    args, found = config.args, []
    if config.host_tier_tokens and own.hardware is None:
        found.append("--enable-hierarchical-cache: copies from host memory take no time with --cost-file")
    if config.speculation is not None and config.speculation.topk > 1:
        found.append("--speculative-eagle-topk: drafts are a chain of the tree's depth; give its --acceptance")
    if args.experts.enable_eplb and own.expert_load is None and own.expert_zipf is None:
        found.append("--enable-eplb: experts move only with --expert-load or --expert-zipf")
    if config.scheduling.stream_interval > 1:
        found.append("--stream-interval: clients get every token immediately")
    if config.lora is not None:
        found.append("--enable-lora: no request has an adapter")
    return found


def _check_numbers(own: argparse.Namespace) -> None:
    datasets.check_dataset_arguments(own)
    datasets.check_numbers(own, LEAST, MOST)
    datasets.check_numbers(own, AGENT_LENGTHS, datasets.MOST_TOKENS)
    for name in ("request_rate", "burstiness", "sample_seconds"):
        value = getattr(own, name)
        if not value > 0 or (math.isinf(value) and name != "request_rate"):
            raise ConfigError(f"{_option(name)} is {value:g}; it must be a number above 0")


def _check_output(own: argparse.Namespace) -> None:
    """Checks that the results can be written, before a run that may take minutes."""
    if own.output_details and not own.output_file:
        raise ConfigError("--output-details: the details go to --output-file FILE.json; add it")
    for name in ("output_file", "log_file", "plot"):
        if value := getattr(own, name):
            check_writable(_option(name), value)
    if own.plot and Path(own.plot).suffix.lower() not in PICTURES:
        raise ConfigError(f"--plot {own.plot}: must end in {', '.join(PICTURES)}")
    if own.plot and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")


def parsed_goodput(own: argparse.Namespace) -> dict[str, float]:
    """Milliseconds by metric. Raises ConfigError: an unknown metric, or no limit."""
    try:
        return serving_report.parse_goodput(own.goodput)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
