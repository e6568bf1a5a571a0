"""``moe-engine serve | generate | bench | plan | doctor | experts | demo``. Each command imports only what it needs.

Exit codes: 0 success; 1 the engine failed; 2 the command line, the configuration or the checkpoint is invalid (one
message on stderr).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_engine.errors import ConfigError, InputError, MoeEngineError

if TYPE_CHECKING:
    from moe_engine.config.args import EngineArgs
    from moe_engine.config.flags import Parser
    from moe_engine.planning.machine import Machine
    from moe_engine.planning.resolve import ResolvedConfig

USAGE_ERROR = 2
BENCH_TOOLS = ("agreeing_checkpoint", "checkpoints", "readme_figures")
"""Scripts of benchmarks/ that prepare or check data and measure nothing."""

HELP = """\
usage: moe-engine COMMAND [options]

An inference engine for DeepSeek-style mixture-of-experts models, for GPUs and CPUs.

commands:
  serve      HTTP server with the OpenAI API and SGLang's /generate
  generate   generate text for one prompt, without a server
  plan       show what `serve` would do with the same flags (all values with reasons, memory, kernels); starts nothing
  doctor     show memory, cores, compiler, libraries, which kernels run on this machine and why others do not
  cluster-check  check that a job's nodes reach each other and can serve together; run it on every node
  compile    compile the GPU kernels of a launch ahead of time into a folder for its nodes; needs no GPU
  bench      run a benchmark; `moe-engine bench` lists them, e.g. one_batch, offline_throughput, serving
  experts    report expert load imbalance of recorded traffic and the gain of EPLB: moe-engine experts DUMP
  demo       print the folder of the model embedded in this package

examples without any download:
  moe-engine generate --prompt "What is the capital of France?"
  moe-engine serve --port 30000
  curl http://127.0.0.1:30000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}'

with your own model; the flags are SGLang's:
  moe-engine plan --model-path /models/DeepSeek-V2-Lite --hardware h200
  moe-engine serve --model-path /models/DeepSeek-V2-Lite --context-length 8192 --port 30000

`moe-engine COMMAND --help` explains a command's flags."""

SERVE_EPILOG = """\
examples:
  moe-engine serve                                        the model embedded in this package
  moe-engine serve --model-path /models/V2-Lite --port 8000 --api-key SECRET
  moe-engine serve --model-path /models/V2-Lite --context-length 8192 --max-running-requests 16
  moe-engine serve --config serve.yaml --log-level debug  flags from a file; the command line wins

SGLang flags that are not implemented yet are rejected by name, never ignored."""

PLAN_EPILOG = """\
examples:
  moe-engine plan                                         the model embedded in this package
  moe-engine plan --model-path /models/V2-Lite --tp 2 --ep 2
  moe-engine plan --config serve.yaml --json              machine-readable

Accepts all flags of `moe-engine serve`."""


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Runs a command; returns the exit code.

    Args:
        argv: arguments after the program's name; None: those of the process.
        prog: program name in the usage line of ``serve``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0 if arguments else USAGE_ERROR
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"moe-engine {version('moe-engine')}")
        return 0
    command, rest = arguments[0], arguments[1:]
    prog = prog or f"moe-engine {command}"
    try:
        if command not in COMMANDS:
            raise ConfigError(_unknown_command(command))
        return COMMANDS[command](rest, prog)
    except (ConfigError, InputError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except MoeEngineError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `moe-engine plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _unknown_command(command: str) -> str:
    from moe_engine.config.values import did_you_mean

    if command.startswith("-"):
        return f"{command}: give a command first, for example `moe-engine serve {command} ...`"
    return f"{command}: unknown command{did_you_mean(command, tuple(COMMANDS))}; `moe-engine --help` lists them"


# -- serve and plan


def serve(argv: Sequence[str], prog: str) -> int:
    return _serve(argv, prog, explain=False)


def plan(argv: Sequence[str], prog: str) -> int:
    return _serve(argv, prog, explain=True)


def _serve(argv: Sequence[str], prog: str, explain: bool) -> int:
    from moe_engine.config.args import EngineArgs
    from moe_engine.config.flags import parse_flags

    description = "Shows what `serve` would do; starts nothing." if explain else "Serves a model over HTTP."
    parser = _engine_parser(prog, description, PLAN_EPILOG if explain else SERVE_EPILOG)
    if explain:
        parser.add_argument(
            "--hardware", metavar="[Nx]GPU", help="plan for GPUs of another machine: h200, or 8xH200 for eight"
        )
    else:
        parser.add_argument("--explain", action="store_true", help="print what would run and why; exit")
    parser.add_argument("--json", action="store_true", help="print JSON" if explain else "with --explain: print JSON")
    values = parse_flags(parser, argv)
    as_json = _pop_switch(values, "json")
    explain = _pop_switch(values, "explain") or explain
    machine = _machine(values)
    args = EngineArgs.from_kwargs(**values)
    if args.model.model_path is None:
        print("no --model-path: using the small model embedded in this package", file=sys.stderr)
    if explain:
        return _explain(args, as_json, machine)
    if as_json:
        raise ConfigError("--json belongs to --explain")
    from moe_engine.server.stop import sigterm_exits

    with sigterm_exits():
        from moe_engine.server import launch

        return int(launch.serve(args))


def _machine(values: dict[str, Any]) -> Machine | None:
    """The machine of --hardware, or None. Sets the device to cuda."""
    from moe_engine.planning.hardware import parse_hardware

    text = values.pop("hardware", None)
    if text is None:
        return None
    if values.setdefault("device", "cuda") != "cuda":
        raise ConfigError(f"--hardware {text} is for GPUs, but --device is {values['device']}; drop one of them")
    return parse_hardware(text)


def _explain(args: EngineArgs, as_json: bool, machine: Machine | None = None) -> int:
    from moe_engine.planning import explain
    from moe_engine.planning.prepare import place_in_cluster, prepare

    config = prepare(args, machine, place=place_in_cluster())
    print(json.dumps(explain.explain_json(config), indent=2) if as_json else explain.explain_text(config))
    return 0


def _engine_parser(prog: str, description: str, epilog: str | None = None) -> Parser:
    import argparse

    from moe_engine.config.args import build_parser

    width = argparse.RawDescriptionHelpFormatter
    usage = f"{prog} [--model-path PATH] [flags]"
    return build_parser(prog, description=description, epilog=epilog, formatter_class=width, usage=usage)


def _pop_switch(values: dict[str, Any], name: str) -> bool:
    return bool(values.pop(name, False))


# -- generate


def generate(argv: Sequence[str], prog: str) -> int:
    """Runs one prompt on the offline engine; text on stdout, everything else on stderr."""
    from moe_engine.config.flags import parse_flags

    parser = _engine_parser(prog, "Generates text for one prompt. Applies the chat template unless --raw is given.")
    group = parser.add_argument_group("prompt and sampling")
    group.add_argument("--prompt", metavar="TEXT", help="the prompt (default: read from standard input)")
    group.add_argument("--raw", action="store_true", help="do not apply the chat template")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="maximum number of new tokens (128)")
    group.add_argument("--temperature", type=float, metavar="T", help="sampling temperature (0: greedy, the default)")
    group.add_argument("--top-p", type=float, metavar="P", help="top-p sampling (nucleus)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop string; may be repeated")
    group.add_argument("--json", action="store_true", help="print the output with meta_info as JSON")
    values = {"prompt": None, "raw": False, "json": False, **parse_flags(parser, argv)}
    prompt, raw, as_json = (values.pop(name) for name in ("prompt", "raw", "json"))
    sampling = {"temperature": 0.0}
    for name in ("max_new_tokens", "temperature", "top_p", "stop"):
        if (value := values.pop(name, None)) is not None:
            sampling[name] = value
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if not prompt:
        raise ConfigError("--prompt: the prompt is empty; give --prompt TEXT or pipe the text in")
    from moe_engine.frontend.engine import Engine

    with Engine(**values) as engine:
        ids = None if raw else _chat_prompt(engine.config, prompt)
        answer = engine.generate(prompt if ids is None else None, sampling, ids)
    assert isinstance(answer, dict)
    print(json.dumps(answer, indent=2, ensure_ascii=False) if as_json else answer["text"])
    return 0


def _chat_prompt(config: ResolvedConfig, prompt: str) -> list[int] | None:
    """Token ids of the prompt rendered as a user message; None if the model has no chat template."""
    from moe_engine.tokenizer.chat_template import load_chat_template
    from moe_engine.tokenizer.tokenizer import load_tokenizer

    flags = config.args.model
    if flags.skip_tokenizer_init:
        raise ConfigError("--skip-tokenizer-init: generate needs the tokenizer")
    tokenizer = load_tokenizer(
        config.tokenizer_path, mode=flags.tokenizer_mode, trust_remote_code=flags.trust_remote_code
    )
    template = load_chat_template(flags.chat_template, tokenizer.chat_template, tokenizer.special_tokens)
    if template is None:
        return None
    text = template.render([{"role": "user", "content": prompt}])
    return tokenizer.encode(text, add_special_tokens=False)


# -- doctor, cluster-check, experts, demo, bench


def doctor(argv: Sequence[str], prog: str) -> int:
    from moe_engine.cli import doctor as report
    from moe_engine.config.flags import Parser

    parser = Parser(prog=prog, description="Reports this machine's hardware and software, and which kernels run here.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(list(argv))
    found = report.examine()
    print(json.dumps(found, indent=2) if options.json else report.as_text(found))
    return 0


def cluster_check(argv: Sequence[str], prog: str) -> int:
    from moe_engine.cli.cluster_check import command

    return command.main(argv, prog)


def experts(argv: Sequence[str], prog: str) -> int:
    from moe_engine.cli.experts_report import command

    return command.main(argv, prog)


def compile_kernels(argv: Sequence[str], prog: str) -> int:
    from moe_engine.cli.compile_kernels import command

    return command.main(argv, prog)


def demo(argv: Sequence[str], prog: str) -> int:
    from moe_engine.config.flags import Parser
    from moe_engine.planning.checkpoint import embedded_model

    Parser(prog=prog, description="Prints the folder of the embedded model.").parse_args(list(argv))
    print(embedded_model())
    return 0


def bench(argv: Sequence[str], prog: str) -> int:
    """Runs benchmarks/NAME.py, or the package benchmarks/NAME, of the source checkout with the remaining arguments."""
    import runpy

    found = _benchmarks()
    if not argv or argv[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:20} {what}" for name, what in found.items() if name not in BENCH_TOOLS)
        listed = listed or "  none: benchmarks/ is only in the source checkout"
        print(f"usage: {prog} NAME [options of the benchmark]\n\nbenchmarks:\n{listed}")
        return 0 if argv else USAGE_ERROR
    name = _benchmark(argv[0], list(found))
    sys.argv = [f"{prog} {name}", *argv[1:]]
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path:
        sys.path.insert(0, root)
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "moe_engine", "benchmarks", "tests"):
            raise
        raise ConfigError(f"{name}: needs {package}, which is not installed: pip install {package}") from None
    return 0


def _benchmark(asked: str, names: list[str]) -> str:
    """The benchmark of that name, or the only one with that prefix."""
    wanted = asked.replace("-", "_").removeprefix("bench_")
    matching = [name for name in names if name == wanted] or [name for name in names if name.startswith(wanted)]
    if len(matching) == 1:
        return matching[0]
    if not names:
        raise ConfigError(f"{asked}: benchmarks are not installed with the package; run it in a source checkout")
    raise ConfigError(f"{asked}: no such benchmark; there are {', '.join(matching or names)}")


def _benchmarks() -> dict[str, str]:
    """Runnable modules and packages of benchmarks/, with the first line of their docstrings."""
    import ast

    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    runnable = {file.stem: file for file in folder.glob("*.py") if '__name__ == "__main__"' in file.read_text()}
    runnable |= {file.parent.name: file.with_name("__init__.py") for file in folder.glob("*/__main__.py")}
    first_lines = {
        name: (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
        for name, file in sorted(runnable.items())
    }
    return {name: line.partition(": ``")[0].rstrip(":.") for name, line in first_lines.items()}


COMMANDS: dict[str, Callable[[Sequence[str], str], int]] = {
    "serve": serve,
    "generate": generate,
    "plan": plan,
    "doctor": doctor,
    "cluster-check": cluster_check,
    "bench": bench,
    "experts": experts,
    "compile": compile_kernels,
    "demo": demo,
}

if __name__ == "__main__":
    sys.exit(main())
