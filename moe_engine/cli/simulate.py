"""``moe-engine simulate``: the production scheduler on a simulated clock, over a trace or generated traffic."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_engine.cli.experts_report.dumps import read_dumps
from moe_engine.cli.output_file import writing
from moe_engine.cli.serve import show_embedded
from moe_engine.cli.simulate_checks import LARGE_PART, check, check_launch, left_out, num_processes, parsed_goodput
from moe_engine.cli.simulate_parts import Parts
from moe_engine.cli.simulated_log import simulated_log
from moe_engine.config.args import EngineArgs, build_parser
from moe_engine.config.flags import Parser, known_options, parse_flags
from moe_engine.config.numbers import real_number
from moe_engine.errors import ConfigError
from moe_engine.planning.output.scheduler_limits import scheduler_config
from moe_engine.planning.parallelism.resolve_elastic import Coverage
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.tuning import datasets, serving_report
from moe_engine.tuning.costs.efficiency import load_efficiency
from moe_engine.tuning.costs.measured import CostFile, MeasuredCosts, other_launch
from moe_engine.tuning.costs.model_facts import model_facts
from moe_engine.tuning.costs.step_cost import StepCostModel
from moe_engine.tuning.hardware.table import parse_cluster
from moe_engine.tuning.planner.given_form import OURS, given_form, host_bytes
from moe_engine.tuning.planner.launch import config_of, held_by, resolve_for, subject_of
from moe_engine.tuning.planner.predict import Predictor
from moe_engine.tuning.simulator import report
from moe_engine.tuning.simulator.agents import add_agent_arguments, agents_of
from moe_engine.tuning.simulator.arrivals import NAMES, arrival_times
from moe_engine.tuning.simulator.expert_load import ExpertLoad, check_counts, zipf_counts
from moe_engine.tuning.simulator.faults import Fault
from moe_engine.tuning.simulator.fleet import Fleet, FleetSpec, Outcome
from moe_engine.tuning.simulator.rank_log import RankLog, messages_to
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from moe_engine.tuning.simulator.sessions import Recorded
from moe_engine.tuning.simulator.traces import read_trace
from moe_engine.tuning.simulator.workload import (
    ANSWER_BYTES,
    DRAWN,
    Arrival,
    Fixed,
    Limited,
    Workload,
    random_prompt,
)

EPILOG = """\
examples:
  moe-engine calibrate --output costs.json                    measure this machine
  moe-engine simulate --cost-file costs.json --request-rate 4 --num-prompts 500 \\
      --random-input-len 256 --random-output-len 64
  moe-engine simulate --cost-file costs.json --dataset-name agentic --num-prompts 400 --agent-system-len 256 \\
      --agent-turns 4 --agent-input-len 64 --agent-output-len 64
  moe-engine simulate --model-path config.json --hardware 8xH200 --tp 8 --attn-dp-size 8 --ep-size 8 --request-rate 20
  moe-engine simulate --cost-file costs.json --dataset-name trace --dataset-path conversation_trace.jsonl

Accepts all flags of `moe-engine serve`: they are the deployment."""
DESCRIPTION = (
    "Simulates a launch under load and prints the figures of `moe-engine bench serving`: the real scheduler on a\n"
    "simulated clock. Step costs are measured (--cost-file) or predicted for GPUs (--hardware)."
)
DRAFT_ACCEPTANCE = 0.8
"""Acceptance rate of a draft token after accepted ones, if none was measured; equal to the planner's."""
OWN_NAMES = ("agentic", "trace")


def main(argv: Sequence[str], prog: str) -> int:
    parser = own_parser()
    own, rest = parser.parse_known_args(list(argv))
    if {"-h", "--help"} & set(rest):
        usage = f"{prog} [options] [flags of moe-engine serve]"
        own_parser(build_parser(prog, serves=False, usage=usage, description=DESCRIPTION, epilog=EPILOG)).parse_args(
            rest
        )
    args = EngineArgs.from_kwargs(
        **parse_flags(build_parser(prog, description="", epilog=""), rest, known_options(parser))
    )
    check(own)
    check_launch(args)
    show_embedded(args)
    goodput = parsed_goodput(own)
    config, source = source_of(own, args)
    for line in left_out(own, config):
        print(f"note: not simulated: {line}", file=sys.stderr)
    with _no_collections():
        return _simulate(own, config, source, goodput)


def _simulate(own: argparse.Namespace, config: ResolvedConfig, source: _Source, goodput: dict[str, float]) -> int:
    """Runs the simulation and writes its results. Returns the exit status."""
    spec = fleet_spec(own, config, source)
    workload = _workload(own, config)
    num_tokens = config.max_total_num_tokens * spec.num_replicas * spec.replica.num_groups
    own.processes = num_processes(own, config, num_tokens, workload)
    began = time.perf_counter()
    simulated = _simulated_in_parts if own.processes > 1 else _simulated
    outcome = simulated(own, config, source, spec, workload)
    values = report.figures(outcome, goodput, time.perf_counter() - began)
    rate, limit = own.request_rate, own.max_concurrency
    sent = "trace" if own.dataset_name == "trace" else str(rate)
    print(serving_report.result_table(values, backend="simulated", request_rate=sent, max_concurrency=limit))
    print(report.remarks(values, outcome))
    if own.output_file:
        record = {name: str(value) if isinstance(value, Path) else value for name, value in vars(own).items()}
        record |= report.details(outcome) if own.output_details else {}
        with writing("--output-file", own.output_file):
            Path(own.output_file).write_text(json.dumps(record | values, indent=1) + "\n", encoding="utf-8")
    if own.plot:
        with writing("--plot", own.plot):
            report.draw(outcome, own.plot, num_tokens)
    return 1 if values["failed"] else 0


def _simulated(
    own: argparse.Namespace, config: ResolvedConfig, source: _Source, spec: FleetSpec, workload: Workload
) -> Outcome:
    with simulated_log(own.log_file, config) as log:
        fleet = _fleet(own, source, spec, workload, log)
        shown = report.progress(workload.total, not own.disable_tqdm)
        with shown as advance, _shown_changes(lambda: fleet.now):
            outcome = fleet.run(advance, interval=_interval(own))
    fleet.discard()
    return outcome


def _simulated_in_parts(
    own: argparse.Namespace, config: ResolvedConfig, source: _Source, spec: FleetSpec, workload: Workload
) -> Outcome:
    parts = Parts(
        workload,
        own.processes,
        lambda load, log: _fleet(own, source, spec, load, log),
        lambda path: simulated_log(path, config),
        own.log_file,
        _interval(own),
    )
    with parts.started() as outcome, report.progress(workload.total, not own.disable_tqdm) as advance:
        return outcome(advance)


def _fleet(own: argparse.Namespace, source: _Source, spec: FleetSpec, workload: Workload, log: RankLog | None) -> Fleet:
    fleet = Fleet(spec, workload, answer_seconds=source.answer_seconds, seed=own.seed, log=log)
    fleet.recorder.keeps_details, fleet.recorder.reply_seconds = own.output_details, source.reply_seconds
    return fleet


def _interval(own: argparse.Namespace) -> float:
    """Simulated seconds between samples."""
    return own.sample_seconds if own.plot else 0.0


@contextmanager
def _shown_changes(clock: Callable[[], float]) -> Iterator[None]:
    """Writes the autopilot's changes to standard error, with the simulated second."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: str(record.msg).startswith("Autopilot"))
    handler.format = lambda record: f"[{clock():.1f} s] {record.getMessage()}"  # type: ignore[method-assign]
    with messages_to(handler):
        yield


@contextmanager
def _no_collections() -> Iterator[None]:
    """Requests and radix trees have no cycles that could be collected, but a collection walks all of their tokens."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def own_parser(parser: Parser | None = None) -> Parser:
    """The flags of this command, added to those of `parser` if there is one."""
    parser = parser or Parser(add_help=False, allow_abbrev=False)
    costs = parser.add_argument_group("costs")
    costs.add_argument("--cost-file", metavar="FILE", help="step costs that `moe-engine calibrate` measured")
    costs.add_argument("--hardware", metavar="[Nx]GPU", help="step costs of `moe-engine plan`: 16xH200, or a TOML file")
    costs.add_argument("--interconnect", metavar="NAME|FILE", help="with --hardware: network between nodes")
    costs.add_argument("--like", metavar="ENGINE", default=OURS, help="with --hardware: efficiency of this engine")
    costs.add_argument("--acceptance", metavar="RATE,...", help="chance that a draft at each position is accepted")
    experts = costs.add_mutually_exclusive_group()
    experts.add_argument("--expert-skew", type=float, help="with --hardware: load of the busiest rank's experts / mean")
    experts.add_argument(
        "--expert-load", metavar="DUMP.pt", help="with --hardware: expert counts that a server recorded and dumped"
    )
    experts.add_argument(
        "--expert-zipf",
        type=float,
        metavar="S",
        help="with --hardware: loads of a layer's experts as 1 / i**S, shuffled",
    )
    datasets.add_dataset_arguments(parser, default_name="random", more_names=OWN_NAMES)
    add_agent_arguments(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, default=math.inf, help="requests (sessions) per second; inf: all together"
    )
    load.add_argument("--arrivals", choices=NAMES, default="poisson", help="times between requests (default: poisson)")
    load.add_argument(
        "--burstiness", type=float, default=1.0, help="shape of gamma arrivals: below 1 is burstier than Poisson"
    )
    load.add_argument("--max-concurrency", type=int, help="max concurrent requests")
    faults = parser.add_argument_group("faults")
    faults.add_argument("--fail", action="append", default=[], metavar="rank=N@t=SECONDSs", help="rank N is lost then")
    faults.add_argument("--recovery-seconds", type=float, default=3.0, help="pause after a loss, with --elastic-ep")
    faults.add_argument(
        "--restart-seconds", type=float, default=120.0, help="no service after a loss, without elastic EP"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--goodput", nargs="+", metavar="METRIC:MS", help="ttft:MS tpot:MS e2el:MS; all must be met")
    output.add_argument("--output-file", metavar="FILE.json", help="write the figures, keys as of bench serving")
    output.add_argument(
        "--output-details", action="store_true", help="also write every request's lengths and phases, and every step"
    )
    output.add_argument(
        "--log-file",
        metavar="FILE",
        help="write the log that the server would write: its batch lines every --decode-log-interval steps; "
        "`moe-engine doctor --log FILE` reads it; plans every step, as --exact",
    )
    output.add_argument("--plot", metavar="FILE.png", help="draw load, KV usage and throughput over time")
    output.add_argument(
        "--sample-seconds", type=float, default=1.0, help="simulated seconds between points of the plot"
    )
    output.add_argument("--exact", action="store_true", help="plan every step, also where nothing changes; slow")
    output.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="simulate a long load in N parts at the same time, with a warm-up of each; needs N times the memory "
        f"(default: the cores, for parts of {LARGE_PART} requests or more that wait for no answer)",
    )
    output.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    return parser


@dataclass(frozen=True)
class _Source:
    """Step costs, and what a cost file knows about the time around the steps: `replica` and `fleet` are arguments of
    `ReplicaSpec` and `FleetSpec`."""

    costs: StepCostModel
    answer_seconds: float
    acceptance: tuple[float, ...]
    replica: Mapping[str, Any]
    fleet: Mapping[str, Any] = field(default_factory=dict)
    reply_seconds: float = 0.0


def source_of(own: argparse.Namespace, args: EngineArgs) -> tuple[ResolvedConfig, _Source]:
    """The launch, and its costs: of a cost file for this machine, or the planner's for another one."""
    if own.hardware is None:
        file = CostFile.load(own.cost_file)
        if file.disturbed:
            print(f"note: {own.cost_file} may be wrong: {file.disturbed}; calibrate again", file=sys.stderr)
        config = prepare(args)
        values = config.flat()
        if other := other_launch(file.launch, {name: values.get(name) for name in args.given}):
            print(
                f"note: the steps of {own.cost_file} were measured with {other}; calibrate this launch", file=sys.stderr
            )
        replica = file.disturbances | {"idle_seconds": file.idle_seconds}
        given = MeasuredCosts(file), file.delivery_seconds, file.acceptance
        return config, _Source(*given, replica, file.frontend_times, file.reply_seconds)
    cluster = parse_cluster(own.hardware, own.interconnect)
    share = load_efficiency(own.like)
    folder, fields, source = config_of(args)
    config = resolve_for(args, subject_of(args, folder), cluster)
    form = given_form(args, cluster, share.engine, config.model)[0]
    facts = model_facts(fields, source)
    kv = "fp8" if config.kv_cache_dtype.startswith("fp8") else "bf16"
    held = (lambda form: held_by(config)) if share.engine == OURS else None
    predictor = Predictor(facts, cluster, share, facts.stored_dtype, host_bytes=host_bytes(args), held=held)
    costs = predictor.cost(form, kv)[0].costs  # steps of a simulation are rarely equal
    drafts = config.speculation.num_steps if config.speculation is not None else 0
    load = {"load_seconds": config.ledger.bytes_per_token / cluster.gpu.bus_bytes_per_s}
    return config, _Source(costs, share.request_ms * 1e-3, (DRAFT_ACCEPTANCE,) * drafts, load)


def fleet_spec(own: argparse.Namespace, config: ResolvedConfig, source: _Source) -> FleetSpec:
    parallel = config.args.parallel
    topology = config.parallel.topology
    groups = topology.attn_dp_size
    num_ranks = topology.tp_size * parallel.dp_size
    acceptance = source.acceptance if own.acceptance is None else _acceptance(own.acceptance, config)
    replica = ReplicaSpec(
        scheduler_config(config),
        source.costs,
        groups,
        overlap=not config.scheduling.disable_overlap_schedule,
        acceptance=acceptance,
        expert_skew=own.expert_skew or 0.0,
        experts=_experts(own, config),
        exact=own.exact,
        graphs=config.graphs,
        **source.replica,
    )
    return FleetSpec(
        replica,
        parallel.dp_size,
        config.load_balance_method,
        faults=tuple(Fault.parse(text, num_ranks) for text in own.fail),
        recovery_seconds=own.recovery_seconds,
        restart_seconds=own.restart_seconds,
        elastic=parallel.elastic_ep,
        least_groups=_least_groups(config),
        **source.fleet,
    )


def _acceptance(text: str, config: ResolvedConfig) -> tuple[float, ...]:
    """The rates of `--acceptance`."""
    if config.speculation is None:
        raise ConfigError(
            f"--acceptance {text}: this launch has no drafts; add --speculative-algorithm, or leave it out"
        )
    try:
        rates = tuple(real_number(rate) for rate in text.split(","))
    except ValueError:
        rates = (-1.0,)
    if not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"--acceptance {text}: write rates between 0 and 1, as in 0.8,0.6")
    return rates


def _least_groups(config: ResolvedConfig) -> int:
    """Minimum number of ranks with which `--elastic-ep` continues: their slots hold all experts."""
    moe, size = config.model.moe, config.parallel.topology.tp_size
    if moe is None or not config.args.parallel.elastic_ep:
        return 1
    return Coverage(moe.num_experts, (moe.num_experts + config.experts.num_redundant) // size).fewest


def _experts(own: argparse.Namespace, config: ResolvedConfig) -> ExpertLoad | None:
    """Expert counts of the options, and the launch's placement."""
    if own.expert_load is None and own.expert_zipf is None:
        return None
    model, option = config.model, "--expert-load" if own.expert_zipf is None else "--expert-zipf"
    if model.moe is None or not model.is_moe:
        raise ConfigError(f"{option}: {model.architecture} has no experts; leave it out")
    num_experts = model.moe.num_experts
    if own.expert_load is not None:
        source = f"--expert-load {own.expert_load}"
        counts = check_counts(read_dumps([own.expert_load]).total, model.num_layers, num_experts, source)
    else:
        counts = zipf_counts(own.expert_zipf, model.moe_layers, num_experts, own.seed)
    layout = config.experts.layout(num_experts, model.moe.num_groups, config.parallel.topology)
    return ExpertLoad(counts, layout, config.experts)


def _workload(own: argparse.Namespace, config: ResolvedConfig) -> Workload:
    """The requests of the options."""
    times = arrival_times(own.arrivals, own.request_rate, random.Random(own.seed), burstiness=own.burstiness)
    workload: Workload
    if own.dataset_name == "agentic":
        workload = agents_of(own, times)
    elif own.dataset_name == "trace":
        workload = Recorded(_of_trace(own.dataset_path, own.num_prompts))
    else:
        workload = _dataset(own, config, times)
    return Limited(workload, own.max_concurrency) if own.max_concurrency else workload


def _of_trace(path: str, most: int) -> list[Arrival]:
    arrivals = read_trace(path, most + 1)
    if len(arrivals) > most:
        print(f"note: the first {most} requests of {path}; --num-prompts N takes more", file=sys.stderr)
    return arrivals[:most]


def _dataset(own: argparse.Namespace, config: ResolvedConfig, times: Iterator[float]) -> Fixed:
    """A request set of bench serving, with its times."""
    try:
        path = Path(config.tokenizer_path)
        vocabulary = datasets.Vocabulary.from_path(
            path if path.is_dir() or path.name == "tokenizer.json" else path.parent
        )
    except FileNotFoundError as error:
        if own.dataset_name == "sharegpt":
            raise ConfigError(f"--dataset-name sharegpt: {error}") from None
        vocabulary = datasets.Vocabulary(lambda text: [], lambda ids: "", list(range(1, config.model.vocab_size)))
    shape = own.random_input_len, own.random_output_len, own.random_range_ratio

    def arrivals(requests: Iterable[datasets.BenchRequest]) -> Iterator[Arrival]:
        return (_arrival(request, seconds, vocabulary.encode) for request, seconds in zip(requests, times))

    def drawn(skip: int) -> Iterator[Arrival]:
        rng = random.Random(own.seed)
        found = datasets.random_requests(own.num_prompts, *shape, vocabulary, rng, skip=skip, head=DRAWN)
        return (_random_arrival(request, seconds) for request, seconds in zip(found, times))

    try:
        if not 0 <= own.random_range_ratio <= 1:
            raise ValueError(f"--random-range-ratio is {own.random_range_ratio}; it must be in [0, 1]")
        if own.dataset_name.startswith("random") and not own.dataset_path:
            if math.isinf(own.request_rate) and not own.max_concurrency:
                datasets.check_memory(own)  # all prompts wait at the same time
            datasets.check_fits("--num-prompts", own.num_prompts, ANSWER_BYTES)
            return Fixed(drawn(0), own.num_prompts, drawn)
        datasets.check_memory(own)
        requests = datasets.make_dataset(own, vocabulary)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    return Fixed(arrivals(requests), len(requests))


def _random_arrival(request: datasets.BenchRequest, seconds: float) -> Arrival:
    assert isinstance(request.prompt, list)
    prompt = random_prompt(request.prompt, request.prompt_len)
    return Arrival(seconds, prompt, request.output_len, is_unique=True)


def _arrival(request: datasets.BenchRequest, seconds: float, encode: Callable[[str], list[int]]) -> Arrival:
    prompt = request.prompt
    return Arrival(seconds, encode(prompt) if isinstance(prompt, str) else prompt, request.output_len)
