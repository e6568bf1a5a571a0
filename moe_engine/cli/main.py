"""``moe-engine COMMAND``: the table of commands. A command's module is imported when the command runs.

Exit codes: 0 success; 1 the engine failed; 2 the command line, the configuration or the checkpoint is invalid (one
message on stderr).
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from moe_engine.cli import USAGE_ERROR
from moe_engine.errors import ConfigError, InputError, MoeEngineError
from moe_engine.processes.open_files import open_standard_streams

COMMANDS = {
    "serve": ("serve:serve", "HTTP server with the OpenAI API and SGLang's /generate"),
    "router": ("router.command:main", "several servers of this machine behind sglang-router"),
    "generate": ("generate:main", "generate text for one prompt, without a server"),
    "plan": (
        "serve:plan",
        "show what `serve` would do with the same flags (all values with reasons, memory, kernels); starts nothing",
    ),
    "calibrate": (
        "calibrate:main",
        "measure the step costs of a launch on this machine, for `simulate` and `plan`",
    ),
    "simulate": (
        "simulate:main",
        "simulate a launch under load: the real scheduler with measured step costs; starts nothing",
    ),
    "doctor": (
        "doctor:main",
        "show what runs on this machine and why not; with --log FILE or --url URL: which flags a server should change",
    ),
    "cluster-check": (
        "cluster_check.command:main",
        "check that a job's nodes reach each other and can serve together; run it on every node",
    ),
    "compile": (
        "compile_kernels.command:main",
        "compile the GPU kernels of a launch ahead of time into a folder for its nodes; needs no GPU",
    ),
    "bench": (
        "bench:main",
        "run a benchmark; `moe-engine bench` lists them, e.g. one_batch, offline_throughput, serving",
    ),
    "experts": (
        "experts_report.command:main",
        "report expert load imbalance of recorded traffic and the gain of EPLB: moe-engine experts DUMP",
    ),
    "quantize": ("quantize:main", "write a quantized copy of a checkpoint: fp8, int8, int4 or mxfp4"),
    "demo": ("demo:main", "print the folder of the model embedded in this package"),
}
"""By name: the function below `moe_engine.cli` that takes (arguments, program name) and returns the exit code; a line
of help."""

HELP = """\
usage: moe-engine COMMAND [options]

An inference engine for DeepSeek-style mixture-of-experts models, for GPUs and CPUs.

commands:
%s

examples without any download:
  moe-engine generate "What is the capital of France?"
  moe-engine serve --port 30000
  curl http://127.0.0.1:30000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}'

with your own model; the flags are SGLang's:
  moe-engine plan --model-path /models/DeepSeek-V2-Lite --hardware h200
  moe-engine serve --model-path /models/DeepSeek-V2-Lite --context-length 8192 --port 30000

`moe-engine COMMAND --help` explains a command's flags."""


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Runs a command; returns the exit code.

    Args:
        argv: arguments after the program's name; None: those of the process.
        prog: program name in the usage line of ``serve``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP % "\n".join(f"  {name:14} {line}" for name, (_, line) in COMMANDS.items()))
        return 0 if arguments else USAGE_ERROR
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"moe-engine {version('moe-engine')}")
        return 0
    open_standard_streams()
    command, rest = arguments[0], arguments[1:]
    prog = prog or (f"moe-engine {command}" if command in COMMANDS else "moe-engine")
    try:
        code = _run(command, rest, prog)
        sys.stdout.flush()
        return code
    except (ConfigError, InputError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except MoeEngineError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `moe-engine plan | head`
        _discard_output()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _discard_output()
        print(f"{prog}: {error.filename or 'the output'} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _discard_output() -> None:
    """What standard output still holds, so that the interpreter's last flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(command: str, argv: Sequence[str], prog: str) -> int:
    if command not in COMMANDS:
        raise ConfigError(_unknown_command(command))
    module, _, function = COMMANDS[command][0].partition(":")
    return int(getattr(import_module(f"moe_engine.cli.{module}"), function)(argv, prog))


def _unknown_command(command: str) -> str:
    from moe_engine.errors import did_you_mean

    if command.startswith("-"):
        return f"{command}: give a command first, for example `moe-engine serve {command} ...`"
    return f"{command}: unknown command{did_you_mean(command, tuple(COMMANDS))}; `moe-engine --help` lists them"


if __name__ == "__main__":
    sys.exit(main())
