"""``moe-engine simulate``: the production scheduler on a simulated clock, over a trace or generated traffic."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from moe_engine.config.args import EngineArgs, build_parser
from moe_engine.config.flags import Parser, parse_flags
from moe_engine.errors import ConfigError
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolve import ResolvedConfig
from moe_engine.planning.scheduler_limits import scheduler_config
from moe_engine.tuning import datasets, serving_report
from moe_engine.tuning.costs.measured import CostFile, MeasuredCosts
from moe_engine.tuning.simulator import report
from moe_engine.tuning.simulator.agents import Agents, AgentShape
from moe_engine.tuning.simulator.arrivals import NAMES, arrival_times
from moe_engine.tuning.simulator.faults import Fault
from moe_engine.tuning.simulator.fleet import Fleet, FleetSpec
from moe_engine.tuning.simulator.replica import ReplicaSpec
from moe_engine.tuning.simulator.traces import read_trace
from moe_engine.tuning.simulator.workload import Arrival, Fixed, Limited, Workload

EPILOG = """\
examples:
  moe-engine calibrate --output costs.json                    measure this machine
  moe-engine simulate --cost-file costs.json --request-rate 4 --num-prompts 500 \\
      --random-input-len 256 --random-output-len 64
  moe-engine simulate --cost-file costs.json --dataset-name agentic --num-prompts 400
  moe-engine simulate --cost-file costs.json --dataset-name trace --dataset-path conversation_trace.jsonl

Accepts all flags of `moe-engine serve`: they are the deployment."""
DESCRIPTION = "Simulates a deployment: the production scheduler on a simulated clock, with measured step costs."
OWN_NAMES = ("agentic", "trace")


def main(argv: Sequence[str], prog: str) -> int:
    own_parser = _own_parser()
    own, rest = own_parser.parse_known_args(list(argv))
    if {"-h", "--help"} & set(rest):
        print(_help(prog))
        return 0
    args = EngineArgs.from_kwargs(**parse_flags(build_parser(prog, description="", epilog=""), rest))
    _check(own)
    config = prepare(args)
    costs = CostFile.load(own.cost_file)
    spec = _fleet(own, config, costs)
    workload = _workload(own, config)
    fleet = Fleet(spec, workload, answer_seconds=costs.answer_seconds, seed=own.seed)
    began = time.perf_counter()
    with report.progress(workload.total, not own.disable_tqdm) as advance:
        outcome = fleet.run(advance, interval=own.sample_seconds)
    values = report.figures(outcome, _goodput(own), time.perf_counter() - began)
    rate, limit = own.request_rate, own.max_concurrency
    print(serving_report.result_table(values, backend="simulated", request_rate=rate, max_concurrency=limit))
    print(report.remarks(values, outcome))
    if own.output_file:
        record = {name: str(value) if isinstance(value, Path) else value for name, value in vars(own).items()}
        Path(own.output_file).write_text(json.dumps(record | values, indent=1) + "\n", encoding="utf-8")
    if own.plot:
        report.draw(outcome, own.plot, config.max_total_num_tokens * spec.num_replicas * spec.replica.num_groups)
    return 1 if values["failed"] else 0


def _help(prog: str) -> str:
    own = _own_parser().format_help().partition("\n\n")[2]
    flags = build_parser(prog, description="", epilog=EPILOG).format_help().partition("\n\n")[2]
    return f"usage: {prog} [options] [flags of moe-engine serve]\n\n{DESCRIPTION}\n\n{own}\n{flags}"


def _own_parser() -> Parser:
    parser = Parser(add_help=False, allow_abbrev=False)
    costs = parser.add_argument_group("costs")
    costs.add_argument("--cost-file", metavar="FILE", help="step costs that `moe-engine calibrate` measured")
    costs.add_argument("--acceptance", metavar="RATE,...", help="chance that a draft at each position is accepted")
    costs.add_argument(
        "--expert-skew", type=float, default=1.0, help="load of the busiest rank's experts over the mean"
    )
    datasets.add_dataset_arguments(parser, default_name="random", more_names=OWN_NAMES)
    agents = parser.add_argument_group("agentic dataset: sessions of several turns, with pauses for tools")
    for option, default, text in (
        ("--agent-turns", AgentShape.turns, "turns of a session"),
        ("--agent-system-len", AgentShape.system_len, "tokens of a system prompt"),
        ("--agent-input-len", AgentShape.input_len, "new tokens of a turn"),
        ("--agent-output-len", AgentShape.output_len, "tokens of an answer"),
        ("--agent-groups", AgentShape.groups, "different system prompts"),
    ):
        agents.add_argument(option, type=int, default=default, help=f"{text} (default: {default})")
    agents.add_argument("--agent-pause", type=float, default=AgentShape.pause, help="mean seconds between turns")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, default=math.inf, help="requests (sessions) per second; inf: at once"
    )
    load.add_argument("--arrivals", choices=NAMES, default="poisson", help="times between requests (default: poisson)")
    load.add_argument(
        "--burstiness", type=float, default=1.0, help="of gamma arrivals: below 1 is burstier than Poisson"
    )
    load.add_argument("--max-concurrency", type=int, help="max concurrent requests")
    faults = parser.add_argument_group("faults")
    faults.add_argument("--fail", action="append", default=[], metavar="rank=N@t=SECONDSs", help="a rank is lost then")
    faults.add_argument("--recovery-seconds", type=float, default=3.0, help="pause after a loss, with --elastic-ep")
    faults.add_argument("--restart-seconds", type=float, default=120.0, help="no service after a loss, without it")
    output = parser.add_argument_group("output")
    output.add_argument("--goodput", nargs="+", metavar="METRIC:MS", help="ttft:MS tpot:MS e2el:MS; all must be met")
    output.add_argument("--output-file", metavar="FILE.json", help="write the figures, keys as of bench serving")
    output.add_argument("--plot", metavar="FILE.png", help="draw load, KV usage and throughput over time")
    output.add_argument(
        "--sample-seconds", type=float, default=1.0, help="simulated seconds between points of the plot"
    )
    output.add_argument("--exact", action="store_true", help="plan every step, also where nothing changes; slow")
    output.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    return parser


def _check(own: argparse.Namespace) -> None:
    """Refuses impossible values, before anything is read."""
    if not own.cost_file:
        raise ConfigError("--cost-file is missing: `moe-engine calibrate --output FILE` measures this machine")
    least = {
        "num_prompts": 1, "random_input_len": 1, "random_output_len": 1,
        "gsp_num_groups": 1, "gsp_prompts_per_group": 1,
        "agent_turns": 1, "agent_groups": 1, "agent_input_len": 1, "agent_output_len": 1, "agent_system_len": 0,
        "agent_pause": 0, "recovery_seconds": 0, "restart_seconds": 0, "expert_skew": 1, "max_concurrency": 1,
    }  # fmt: skip
    for name, bound in least.items():
        value = getattr(own, name)
        if value is not None and not bound <= value < 1e12:
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; it must be at least {bound}")
    for name in ("request_rate", "burstiness", "sample_seconds"):
        if not getattr(own, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(own, name):g}; it must be above 0")
    if own.arrivals != "poisson" and math.isinf(own.request_rate):
        raise ConfigError(f"--arrivals {own.arrivals} needs a finite --request-rate")


def _goodput(own: argparse.Namespace) -> dict[str, float]:
    try:
        return serving_report.parse_goodput(own.goodput)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _fleet(own: argparse.Namespace, config: ResolvedConfig, costs: CostFile) -> FleetSpec:
    parallel = config.args.parallel
    topology = config.parallel.topology
    groups = topology.attn_dp_size
    num_ranks = topology.tp_size * parallel.dp_size
    acceptance = costs.acceptance
    if own.acceptance:
        try:
            acceptance = tuple(float(rate) for rate in own.acceptance.split(","))
        except ValueError:
            acceptance = (-1.0,)
        if not all(0 <= rate <= 1 for rate in acceptance):
            raise ConfigError(f"--acceptance {own.acceptance}: write rates between 0 and 1, as in 0.8,0.6")
    replica = ReplicaSpec(
        scheduler_config(config),
        MeasuredCosts(costs),
        groups,
        overlap=not config.scheduling.disable_overlap_schedule,
        acceptance=acceptance,
        expert_skew=own.expert_skew,
        exact=own.exact,
    )
    return FleetSpec(
        replica,
        parallel.dp_size,
        parallel.load_balance_method,
        faults=tuple(Fault.parse(text, num_ranks) for text in own.fail),
        recovery_seconds=own.recovery_seconds,
        restart_seconds=own.restart_seconds,
        elastic=parallel.elastic_ep,
    )


def _workload(own: argparse.Namespace, config: ResolvedConfig) -> Workload:
    """The requests of the options."""
    times = arrival_times(own.arrivals, own.request_rate, random.Random(own.seed), burstiness=own.burstiness)
    workload: Workload
    if own.dataset_name == "agentic":
        shape = AgentShape(
            own.agent_turns, own.agent_system_len, own.agent_input_len, own.agent_output_len, own.agent_pause,
            own.agent_groups,
        )  # fmt: skip
        workload = Agents(shape, times, max(own.num_prompts // own.agent_turns, 1), own.seed)
    elif own.dataset_name == "trace":
        arrivals = read_trace(own.dataset_path, own.num_prompts)
        workload = Fixed(sorted(arrivals, key=lambda arrival: arrival.seconds), len(arrivals))
    else:
        workload = _dataset(own, config, times)
    return Limited(workload, own.max_concurrency) if own.max_concurrency else workload


def _dataset(own: argparse.Namespace, config: ResolvedConfig, times: Iterator[float]) -> Fixed:
    """A request set of bench serving, with its times."""
    try:
        vocabulary = datasets.Vocabulary.from_path(config.tokenizer_path)
    except FileNotFoundError as error:
        if own.dataset_name == "sharegpt":
            raise ConfigError(f"--dataset-name sharegpt: {error}") from None
        vocabulary = datasets.Vocabulary(lambda text: [], lambda ids: "", list(range(1, config.model.vocab_size)))
    requests: Iterable[datasets.BenchRequest]
    try:
        if own.dataset_name.startswith("random") and not own.dataset_path:
            shape = own.random_input_len, own.random_output_len, own.random_range_ratio
            requests = datasets.iter_random_requests(own.num_prompts, *shape, vocabulary, random.Random(own.seed))
            total = own.num_prompts
        else:
            requests = datasets.make_dataset(own, vocabulary)
            total = len(requests)
        if not 0 <= own.random_range_ratio <= 1:
            raise ValueError(f"--random-range-ratio is {own.random_range_ratio}; it must be in [0, 1]")
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    return Fixed((_arrival(request, seconds, vocabulary.encode) for request, seconds in zip(requests, times)), total)


def _arrival(request: datasets.BenchRequest, seconds: float, encode: Callable[[str], list[int]]) -> Arrival:
    prompt = request.prompt
    return Arrival(seconds, encode(prompt) if isinstance(prompt, str) else prompt, request.output_len)
