"""The command line of `moe-engine router`: flags before ``--`` are the router's, those after it every server's."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from moe_engine.config.args import EngineArgs
from moe_engine.config.flags import Parser
from moe_engine.errors import ConfigError
from moe_engine.server.listen import find_address, url_host

MODULE = "sglang_router.launch_router"
RECOVERY = ("--health-failure-threshold", "2", "--retry-max-retries", "10")
"""The retries last 3.7 s: longer than two health checks, after which they go to another server."""
NO_BREAKER = "--disable-circuit-breaker"
"""The router's circuit breaker counts the errors of clients (400, 404) as failures of a server: ten of them in a row
close the server to all clients for a minute. Health checks find servers that fail."""
EPILOG = """\
examples:
  moe-engine router --workers 2 -- --model-path /models/V2-Lite
  moe-engine router --workers 4 --policy round_robin --port 8000 -- --model-path /models/V3 --tp 2

Other flags before -- are passed to the router; `python -m sglang_router.launch_router --help` lists them.
A server that dies is restarted on its port; the router sends it no requests meanwhile."""


@dataclass(frozen=True)
class Fleet:
    """What to start.

    Args:
        worker_flags: of each server, without its port; one list a server.
        router: the program and all of its flags.
        tls: the router serves HTTPS.
    """

    worker_flags: list[list[str]]
    worker_ports: list[int]
    router: list[str]
    host: str
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://{url_host(self.host)}:{self.port}"


def parse(argv: Sequence[str], prog: str = "moe-engine router") -> Fleet:
    """Raises ConfigError: for wrong flags of either side, or without the router's package."""
    own, behind, serve = list(argv), "--" in argv, list[str]()
    if behind:
        cut = own.index("--")
        own, serve = own[:cut], own[cut + 1 :]
    parser = _parser(prog)
    given, passed = parser.parse_known_args(own)
    passed_flags = {word.partition("=")[0] for word in passed}
    if "--worker-urls" in passed_flags:
        raise ConfigError(f"--worker-urls: this command starts its servers; for others use python -m {MODULE}")
    if given.workers < 1:
        raise ConfigError(f"--workers {given.workers}: at least 1")
    first_port = given.worker_port if given.worker_port is not None else given.port + 1
    ports = list(range(first_port, first_port + given.workers))
    if given.port in ports:
        raise ConfigError(
            f"--worker-port {first_port}: the {given.workers} servers would take the router's port {given.port}; use "
            f"{given.port + 1}"
        )
    args = EngineArgs.from_cli(serve)
    _check_serve_flags(args)
    worker_flags = [[*serve, *_share_of(args, i, given.workers)] for i in range(given.workers)]
    router = [
        *_program(given.router_program), "--host", _address(given.host, given.port), "--port", str(given.port),
        "--policy", given.policy, "--health-check-interval-secs", str(given.health_check_interval_secs),
        "--worker-startup-check-interval", "1", *RECOVERY,
        *(() if any(flag.startswith("--cb-") for flag in passed_flags) else (NO_BREAKER,)),
        "--worker-urls", *(f"http://127.0.0.1:{port}" for port in ports), *passed,
    ]  # fmt: skip
    if args.server.api_key is not None:
        router += ["--api-key", args.server.api_key]
    return Fleet(worker_flags, ports, router, given.host, given.port, tls="--tls-cert-path" in passed_flags)


def _address(host: str, port: int) -> str:
    """The router takes no names, and IPv6 addresses in brackets."""
    address = find_address(host, port)[1][0]
    return f"[{address}]" if ":" in address else address


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog,
        usage=f"{prog} [flags of the router] -- [flags of `moe-engine serve`]",
        description="Several servers on this machine, and sglang-router before them (pip install -e '.[router]').",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="servers to start. Default: 2.")
    parser.add_argument("--host", default="127.0.0.1", help="address of the router. Default: 127.0.0.1.")
    parser.add_argument("--port", type=int, default=30000, help="port of the router. Default: 30000.")
    parser.add_argument("--worker-port", type=int, metavar="PORT", help="port of the first server. Default: PORT + 1.")
    parser.add_argument(
        "--policy",
        default="cache_aware",
        choices=("cache_aware", "round_robin", "power_of_two", "random", "manual"),
        help="which server gets a request. Default: cache_aware.",
    )
    parser.add_argument(
        "--health-check-interval-secs", type=int, default=1, metavar="SECONDS",
        help="interval of health checks; a restarted server is used after two checks. Default: 1.",
    )  # fmt: skip
    parser.add_argument(
        "--router-program", metavar="COMMAND", help=f"command that starts the router. Default: python -m {MODULE}."
    )
    return parser


def _program(given: str | None) -> list[str]:
    if given is not None:
        return shlex.split(given)
    if importlib.util.find_spec("sglang_router") is None:
        raise ConfigError(
            "the package sglang-router is not installed: pip install -e '.[router]', or name the program of "
            "another environment: --router-program '/path/python -m sglang_router.launch_router'"
        )
    return [sys.executable, "-m", MODULE]


def _check_serve_flags(args: EngineArgs) -> None:
    if args.server.port != EngineArgs().server.port or args.server.host != EngineArgs().server.host:
        raise ConfigError("--host and --port behind --: the router has the public address, give them before --")
    if args.server.ssl_certfile is not None:
        raise ConfigError(
            "--ssl-certfile behind --: the servers listen on 127.0.0.1 only; use the router's --tls-cert-path"
        )
    if args.parallel.nnodes > 1:
        raise ConfigError(
            "--nnodes: these servers share one machine; slurm/serve.sbatch starts replicas of several nodes"
        )


def _share_of(args: EngineArgs, index: int, num_workers: int) -> list[str]:
    """Flags by which the servers divide the machine: GPUs, or cores of a CPU."""
    from moe_engine.planning.inputs.machine import probe_machine

    machine, parallel = probe_machine(args.model.device), args.parallel
    if not machine.on_cpu:
        ranks = parallel.tp_size * (1 if parallel.enable_dp_attention else parallel.dp_size)
        if machine.num_devices is not None and num_workers * ranks > machine.num_devices - parallel.base_gpu_id:
            raise ConfigError(
                f"--workers {num_workers}: {num_workers} servers of {ranks} GPUs, and this machine has "
                f"{machine.num_devices - parallel.base_gpu_id}; use fewer servers, or fewer GPUs for each"
            )
        return ["--base-gpu-id", str(parallel.base_gpu_id + index * ranks * parallel.gpu_id_step)]
    if args.backends.cpu_threads is not None:
        return []
    return ["--cpu-threads", str(max(1, machine.cores // num_workers))]
