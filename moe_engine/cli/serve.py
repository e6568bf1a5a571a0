"""``moe-engine serve`` and ``moe-engine plan``, which shows what `serve` would do."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from moe_engine.config.args import EngineArgs, build_parser
from moe_engine.config.flags import parse_flags
from moe_engine.errors import ConfigError

if TYPE_CHECKING:
    from moe_engine.planning.inputs.machine import Machine

SERVE = "Serves a model over HTTP: the OpenAI, Anthropic and Ollama APIs and SGLang's endpoints."
SERVE_EPILOG = """\
examples:
  moe-engine serve                                        the model embedded in this package
  moe-engine serve --model-path /models/V2-Lite --port 8000 --api-key SECRET
  moe-engine serve --model-path /models/V2-Lite --context-length 8192 --max-running-requests 16
  moe-engine serve --config serve.yaml --log-level debug  flags from a file; the command line wins

SGLang flags that are not implemented yet are rejected by name, never ignored."""

PLAN = (
    "Shows what `serve` would do with the same flags: every value with its reason, memory, kernels. Starts nothing.\n"
    "With --workload: the best forms of parallelism on given GPUs."
)
PLAN_EPILOG = """\
examples:
  moe-engine plan                                         the model embedded in this package
  moe-engine plan --model-path /models/V2-Lite --tp 2 --ep 2
  moe-engine plan --config serve.yaml --json              machine-readable
  moe-engine plan --model-path config.json --hardware 16xH200 --workload in=2000,out=100 --slo ttft=2s,itl=50ms

Accepts all flags of `moe-engine serve`."""


def serve(argv: Sequence[str], prog: str) -> int:
    parser = build_parser(prog, description=SERVE, epilog=SERVE_EPILOG)
    parser.add_argument("--explain", action="store_true", help="print what would run and why; exit")
    parser.add_argument("--json", action="store_true", help="with --explain: print JSON")
    values = parse_flags(parser, argv)
    explain, as_json = values.pop("explain", False), values.pop("json", False)
    args = _engine_args(values)
    if explain:
        return _explain(args, as_json)
    if as_json:
        raise ConfigError("--json belongs to --explain: add that, or drop --json")
    from moe_engine.server.stop import stop_signals_exit

    with stop_signals_exit():
        from moe_engine.server import launch

        return launch.serve(args)


def plan(argv: Sequence[str], prog: str) -> int:
    parser = build_parser(prog, description=PLAN, epilog=PLAN_EPILOG)
    parser.add_argument(
        "--hardware", metavar="[Nx]GPU", help="plan for other GPUs than this machine's: h200, or 8xH200"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--explain", action="store_true", help="as `serve --explain`: what `plan` prints anyway")
    from moe_engine.cli import plan_workload

    plan_workload.add_flags(parser)
    values = parse_flags(parser, argv)
    if values.pop("explain", False) and "workload" in values:
        raise ConfigError("--explain shows one launch, --workload compares launches; drop one of them")
    if own := plan_workload.take_flags(values):
        hardware, as_json = values.pop("hardware", None), values.pop("json", False)
        return plan_workload.plan_workload(own, _engine_args(values), hardware, as_json)
    as_json, machine = values.pop("json", False), _machine(values)
    return _explain(_engine_args(values), as_json, machine)


def _engine_args(values: dict[str, Any]) -> EngineArgs:
    args = EngineArgs.from_kwargs(**values)
    show_embedded(args)
    return args


def show_embedded(args: EngineArgs) -> None:
    """A note if the embedded model is used for lack of another one."""
    if args.model.model_path is None:
        with suppress(OSError):  # a full disk below it does not end the start
            print("no --model-path: using the small model embedded in this package", file=sys.stderr)


def _machine(values: dict[str, Any]) -> Machine | None:
    """The machine of --hardware, or None. Sets the device to cuda."""
    from moe_engine.tuning.hardware.table import parse_cluster

    text = values.pop("hardware", None)
    if text is None:
        return None
    if values.setdefault("device", "cuda") != "cuda":
        raise ConfigError(f"--hardware {text} is for GPUs, but --device is {values['device']}; drop one of them")
    cluster = parse_cluster(text)
    return cluster.gpu.machine(cluster.num_gpus if text.strip()[0].isdigit() else None, has_libraries=True)


def _explain(args: EngineArgs, as_json: bool, machine: Machine | None = None) -> int:
    from moe_engine.planning.output import explain
    from moe_engine.planning.prepare import place_in_cluster, prepare

    config = prepare(args, machine, place=place_in_cluster())
    print(json.dumps(explain.explain_json(config), indent=2) if as_json else explain.explain_text(config))
    return 0
