"""``moe-engine doctor``: reports the machine's hardware and software, which kernels run here, and problems. Imports no
torch on machines without a GPU. With --log or --url: the flags to change, from a server's log or a running server."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from moe_engine.cli import doctor_libraries
from moe_engine.cli.node_checks.node import check_node
from moe_engine.config.flags import Parser
from moe_engine.errors import ConfigError
from moe_engine.kernels import tables
from moe_engine.kernels.device import Device, Need, cpu_device
from moe_engine.planning.inputs.machine import probe_machine
from moe_engine.planning.memory.ledger import gb
from moe_engine.processes.runtime_dir import check_temporary

PACKAGES = (
    "moe-engine", "torch", "safetensors", "tokenizers", "transformers", "starlette", "uvicorn", "pyzmq", "triton",
)  # fmt: skip
USEFUL_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
LEAST_FILES = 4096


DESCRIPTION = """\
Reports this machine's hardware and software, and which kernels run here. With --log or --url: evaluates the rules of
the tuning guides on a log or a running server (this engine's or SGLang's), and names the flag to change."""
EPILOG = """\
exit code with --log and --url: 0, no rule recommends a change; 1, at least one does; 2, wrong input

examples:
  moe-engine doctor                                   this machine
  moe-engine doctor --log server.log                  every window of five minutes of a log
  kubectl logs POD | moe-engine doctor --log - --json
  moe-engine doctor --log server.log --follow         prints a rule as soon as it holds; Ctrl-C ends
  moe-engine doctor --url http://localhost:30000      the last minutes of a server"""


def main(argv: Sequence[str], prog: str) -> int:
    parser = _parser(prog)
    options = parser.parse_args(list(argv))
    if options.url is not None or options.log is not None:
        from moe_engine.cli import doctor_logs

        return doctor_logs.run(options)
    if options.follow or options.api_key is not None:
        raise ConfigError("--follow needs --log FILE, and --api-key needs --url URL")
    if options.window is not None or options.sample_seconds is not None:
        raise ConfigError("--window needs --log FILE or --url URL, and --sample-seconds needs --url URL")
    found = examine()
    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return 0


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog, description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--log", metavar="FILE", help="log of a server; - reads standard input")
    parser.add_argument("--url", metavar="URL", help="address of a running server, as http://localhost:30000")
    parser.add_argument("--api-key", metavar="KEY", help="with --url: the server's key")
    parser.add_argument(
        "--window", type=float, metavar="SECONDS",
        help="rules hold over windows of this length (300; 0: the whole log); with --url: the last seconds",
    )  # fmt: skip
    parser.add_argument(
        "--sample-seconds", type=float, metavar="SECONDS",
        help="with --url: seconds to observe a server that keeps no history (SGLang) (15)",
    )  # fmt: skip
    parser.add_argument("--follow", action="store_true", help="with --log: keep reading a file that is still written")
    return parser


def examine() -> dict[str, Any]:
    """All findings as JSON-compatible values. `problems`: sentences with the fix."""
    machine = probe_machine()
    host = machine if machine.on_cpu else probe_machine("cpu")
    cpu = cpu_device()
    libraries = doctor_libraries.libraries(machine.device.kind)
    node = check_node()
    return {
        "device": {"kind": machine.device.kind, "name": machine.device.name, "reason": machine.device_reason},
        "memory": {
            "total_bytes": host.total_bytes,
            "available_bytes": host.available_bytes,
            "source": host.source,
            "device_available_bytes": machine.available_bytes,
        },
        "cpu": {
            "name": cpu.name,
            "cores": host.cores,
            "logical_cpus": os.cpu_count(),
            "flags": [flag for flag in USEFUL_CPU_FLAGS if flag in cpu.cpu_flags],
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
        "compiler": {"path": cpu.compiler, "version": _compiler_version(cpu.compiler)},
        "system": {"os": platform.platform(), "python": platform.python_version()},
        "packages": {name: _version(name) for name in PACKAGES},
        "kernels": _kernels(_device(machine.device.kind, cpu)),
        "libraries": libraries,
        "cuda_compiler": doctor_libraries.cuda_compiler(),
        "node": [{"name": check.name, "status": check.status, "text": check.text} for check in node],
        "problems": [
            *_problems(cpu),
            *doctor_libraries.problems(libraries),
            *(check.sentence for check in node if check.status == "problem"),
        ],
    }


def _device(kind: str, cpu: Device) -> Device:
    if kind == "cpu":
        return cpu
    from moe_engine.kernels.device import probe

    return probe(kind)


def _kernels(device: Device) -> dict[str, dict[str, str]]:
    """By family and row: ``runs``, or ``does not run`` with the reason, for bfloat16."""
    found: dict[str, dict[str, str]] = {}
    for family, rows in tables.FAMILIES.items():
        kind = family if family in ("mla", "gqa") else None
        need = Need("bfloat16", attention=kind or "mla")
        reasons = {row.name: row.why_not(device, need) for row in rows}
        shown = f"attention ({kind.upper()})" if kind else family
        found[shown] = {name: f"does not run: {why}" if why else "runs" for name, why in reasons.items()}
    return found


def _compiler_version(compiler: str | None) -> str | None:
    if compiler is None:
        return None
    try:
        output = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=5).stdout
        return output.splitlines()[0] if output else None
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _problems(cpu: Device) -> list[str]:
    found = []
    if cpu.compiler is None:
        found.append("no C++ compiler: the slower torch kernels will be used; install g++ (Debian: apt install g++)")
    try:
        check_temporary()
    except ConfigError as error:
        found.append(str(error))
    else:
        if (free := shutil.disk_usage(folder := tempfile.gettempdir()).free) < 1 << 30:
            found.append(f"only {gb(free)} free in {folder}: compiled kernels and sockets are stored there")
    shm = Path("/dev/shm")
    if shm.exists() and shutil.disk_usage(shm).free < 64 << 20:
        found.append("/dev/shm is nearly full; start the container with --shm-size 1g")
    limit = _open_files()
    if limit is not None and limit < LEAST_FILES:
        found.append(f"at most {limit} open files: too few for many connections; run `ulimit -n 65536` first")
    for package in ("torch", "tokenizers", "starlette", "uvicorn"):
        if _version(package) is None:
            found.append(f"{package} is not installed: pip install {package}")
    return found


def _open_files() -> int | None:
    try:
        import resource

        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):
        return None


def as_text(found: dict[str, Any]) -> str:
    """The findings as aligned text."""
    memory, cpu = found["memory"], found["cpu"]
    used = f"{found['device']['kind']} ({found['device']['reason']})"
    rows = [
        ("device", f"{found['device']['name']}, {used}"),
        ("memory", f"{gb(memory['available_bytes'])} of {gb(memory['total_bytes'])} available, {memory['source']}"),
        ("cpu", f"{cpu['name']}: {cpu['cores']} usable cores, {cpu['logical_cpus']} logical CPUs"),
        ("cpu flags", " ".join(cpu["flags"]) or "no relevant ones"),
        ("compiler", found["compiler"]["version"] or found["compiler"]["path"] or "none"),
        ("system", f"{found['system']['os']}, Python {found['system']['python']}"),
        ("packages", ", ".join(f"{name} {version or 'missing'}" for name, version in found["packages"].items())),
    ]
    if found["device"]["kind"] == "cuda":
        rows.insert(2, ("GPU memory", f"{gb(memory['device_available_bytes'])} free"))
    lines = [f"{name:<11} {text}" for name, text in rows]
    lines += ["", "kernels (bfloat16):"]
    for family, table in found["kernels"].items():
        lines += [f"  {family:<16} {name:<17} {status}" for name, status in table.items()]
    lines += ["", "GPU libraries:", *(f"  {name:<18} {status}" for name, status in found["libraries"].items())]
    lines += [f"  {'nvcc':<18} {found['cuda_compiler']}"]
    lines += ["", "node:", *(f"  {row['name']:<18} {row['status']:<8} {row['text']}" for row in found["node"])]
    problems = found["problems"]
    lines += ["", "problems:" if problems else "no problems found", *(f"  {text}" for text in problems)]
    return "\n".join(lines)
