"""``moe-engine calibrate``: starts a server with the given flags, measures its step costs and writes a cost file."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

from moe_engine.cli import USAGE_ERROR
from moe_engine.cli.output_file import check_writable, writing
from moe_engine.cli.serve import show_embedded
from moe_engine.config.args import EngineArgs, build_parser
from moe_engine.config.flags import Parser, parse_flags
from moe_engine.errors import ConfigError, MoeEngineError
from moe_engine.planning.memory.ledger import WEIGHT_ROWS
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.processes.addresses import free_port
from moe_engine.processes.child import end_with_parent
from moe_engine.tuning.calibration import Probes
from moe_engine.tuning.costs.measured import CostFile
from moe_engine.tuning.datasets import Vocabulary
from moe_engine.tuning.disturbance import Watch, conditions_of
from moe_engine.tuning.frozen_heap import frozen_heap
from moe_engine.tuning.measured_points import Limits

DESCRIPTION = (
    "Measures the step costs of a launch on this machine, for `simulate --cost-file` and `plan --cost-file`: starts a\n"
    "server with the given flags, sends requests, writes the file and stops the server."
)
EPILOG = """\
examples:
  moe-engine calibrate --output costs.json                            the model embedded in this package
  moe-engine calibrate --model-path /models/V2-Lite --tp 2 --output costs.json

Nothing else should compute on the machine meanwhile. Accepts all flags of `moe-engine serve`."""
START_SECONDS = 1800
END_SECONDS = 10
"""For the end of a server one of whose processes has ended."""
USUAL_LINES = "INFO: ", "Shutting down", "Finished server process"
BESIDE = 4
"""Answers that decode while prompts are measured."""


def main(argv: Sequence[str], prog: str) -> int:
    own_parser = Parser(add_help=False, allow_abbrev=False)
    own_parser.add_argument("--output", metavar="FILE", help="where the cost file goes (required)")
    own, rest = own_parser.parse_known_args(list(argv))
    parser = build_parser(prog, serves=False, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--output", metavar="FILE", help="where the cost file goes (required)")
    values = parse_flags(parser, rest)
    values.pop("output", None)
    args = EngineArgs.from_kwargs(**values)
    if not own.output:
        raise ConfigError("--output is missing: the file that `moe-engine simulate --cost-file` takes")
    check_writable("--output", own.output)
    if args.parallel.nnodes > 1:
        raise ConfigError("--nnodes: calibrate measures a server on one machine; run it on the first node alone")
    show_embedded(args)
    config = prepare(args)
    costs = measure(rest, config)
    with writing("--output", own.output):
        Path(own.output).write_text(costs.to_json(), encoding="utf-8")
    print(f"wrote {own.output}\n{_summary(costs)}")
    if costs.disturbed:
        print(f"warning: {costs.disturbed}; run calibrate again on a quiet machine", file=sys.stderr)
    return 0


def measure(
    flags: Sequence[str], config: ResolvedConfig, after_round: Callable[[int, int], None] | None = None
) -> CostFile:
    """The costs of a launch, by a server that runs meanwhile.

    Args:
        flags: of `serve`.
        config: what `prepare` makes of these flags.
        after_round: what a benchmark measures on the same server between the rounds, with the server's port and the
            number of the round from 0. It runs in a thread.
    """
    port = free_port()
    command = [sys.executable, "-m", "moe_engine", "serve", *flags, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--record-step-times"]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=end_with_parent)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(server, url, log)
            limits = _limits(config)
            with _its_end_named(server, log), frozen_heap():
                info = httpx.get(f"{url}/server_info", timeout=60).json()
                front_end = psutil.Process(server.pid)
                watch = Watch(lambda: [front_end, *front_end.children(recursive=True)])
                probes = Probes(url, limits, partial(_cpu_seconds, server.pid), watch)

                async def between(number: int) -> None:
                    if after_round is not None:
                        await asyncio.to_thread(after_round, port, number)

                costs = uvloop.run(probes.run(_say, between))
            conditions = conditions_of(probes.disturbances, probes.spread, probes.slowness)
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    costs = replace(costs, ledger=_ledger(config, info), conditions=conditions)
    return replace(costs, launch=_launch(config), machine=_machine(config))


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process. Linux has a clock for each process; psutil's times have steps of 10 ms."""
    if sys.platform == "linux":
        return time.clock_gettime((~pid << 3) | 2)
    return sum(psutil.Process(pid).cpu_times()[:2])


def _say(text: str) -> None:
    print(f"measuring: {text}", file=sys.stderr)


def _wait(server: subprocess.Popen[bytes], url: str, log: Any) -> None:
    """Waits until the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise _its_end(server, log)
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise MoeEngineError(f"the server was not ready after {START_SECONDS} s")


def _its_end(server: subprocess.Popen[bytes], log: Any) -> MoeEngineError:
    """The error of a server that has ended, by its last lines that do not report its requests or its end."""
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    last = [line for line in lines if not any(words in line for words in USUAL_LINES)][-3:]
    if server.returncode == USAGE_ERROR and last:
        return ConfigError(last[-1].partition("error: ")[2])
    return MoeEngineError(f"the server ended with code {server.returncode}: {' '.join(last)}")


@contextmanager
def _its_end_named(server: subprocess.Popen[bytes], log: Any) -> Iterator[None]:
    """Requests of the measurement that fail because the server ends: its end is the error."""
    try:
        yield
    except (MoeEngineError, httpx.HTTPError, psutil.Error) as error:
        with suppress(subprocess.TimeoutExpired):
            server.wait(END_SECONDS)
        if server.returncode is not None:
            raise _its_end(server, log) from None
        if isinstance(error, MoeEngineError):
            raise
        raise MoeEngineError(f"the server does not answer: {error or type(error).__name__}") from None


def _limits(config: ResolvedConfig) -> Limits:
    speculation = config.speculation
    if speculation is not None and speculation.auto_depth:
        raise ConfigError(
            "--speculative-num-steps auto: calibrate measures one depth; give a number, for instance "
            f"--speculative-num-steps {speculation.num_steps}"
        )
    try:
        vocab: Sequence[int] = Vocabulary.from_path(config.tokenizer_path).plain_ids
    except FileNotFoundError:
        vocab = range(1, config.model.vocab_size)
    chunk, replicas = config.chunked_prefill_size, config.args.parallel.dp_size
    groups = config.parallel.topology.attn_dp_size * replicas
    # a step with prompts and decodes, or of several schedulers, is not that of the prompts
    beside = 0 if groups > 1 or config.scheduling.enable_mixed_chunk else min(BESIDE, config.max_running_requests - 1)
    return Limits(
        max_running=config.max_running_requests,
        max_input=config.max_req_input_len,
        pool=config.max_total_num_tokens,
        chunk=chunk if chunk > 0 else config.max_req_input_len,
        vocab=vocab,
        drafts=speculation.num_steps if speculation is not None else 0,
        num_groups=groups,
        beside=beside,
        num_replicas=replicas,
    )


def _ledger(config: ResolvedConfig, info: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes of the first rank: what the ledger predicted, and what was allocated."""
    state = (info.get("internal_states") or [{}])[0]
    weights = sum(config.ledger.bytes_of(name) for name in WEIGHT_ROWS)
    found = {"weights": {"predicted": weights, "allocated": int(state.get("weight_bytes", 0))}}
    kv_bytes = config.ledger.bytes_per_token * (config.max_total_num_tokens + config.page_size)
    return found | {"kv cache": {"predicted": kv_bytes, "allocated": int(state.get("kv_bytes", 0))}}


def _launch(config: ResolvedConfig) -> dict[str, Any]:
    values = config.flat()
    return {name: values[name] for name in sorted(config.args.given) if isinstance(values.get(name), (str, int, float))}


def _machine(config: ResolvedConfig) -> dict[str, Any]:
    machine = config.machine
    return {"device": machine.device.name, "cores": machine.cores}


def _summary(costs: CostFile) -> str:
    (drafts, curve), *_ = costs.decode.items()
    rows = ", ".join(f"{int(n)}: {s * 1e3:.2f} ms" for n, s in zip(curve.counts, curve.seconds))
    prompts = ", ".join(f"{int(n)}: {s * 1e3:.2f} ms" for n, s in zip(costs.prefill.counts, costs.prefill.seconds))
    lines = [
        f"decode step{f' with {drafts} drafts' if drafts else ''}, by requests: {rows}",
        f"prefill step, by tokens: {prompts}",
        f"a context token of a decode: {costs.context_second * 1e9:.1f} ns; a cached token before a prompt: "
        f"{costs.cached_second * 1e9:.1f} ns; a pair of a prefill: {costs.pair_second * 1e9:.2f} ns, "
        f"of different prompts {(costs.split_second or 0.0) * 1e9:.2f} ns less",
        f"an answer outside the steps: {costs.answer_seconds * 1e3:.2f} ms; a request with others makes the steps "
        f"longer by {costs.arrival_seconds * 1e3:.2f} ms, its end by {costs.end_seconds * 1e3:.2f} ms, its token by "
        f"{costs.sent_seconds * 1e6:.0f} us; frontend and client compute {costs.request_seconds * 1e3:.2f} ms for a "
        f"request, {costs.results_seconds * 1e6:.0f} us for the results of a step and {costs.token_seconds * 1e6:.0f} "
        f"us for each token in it; a request waits "
        f"{costs.idle_seconds * 1e3:.2f} ms more for an idle engine, {costs.busy_seconds * 1e3:.2f} ms for a busy one",
    ]
    for name, sizes in costs.ledger.items():
        lines.append(f"{name}: predicted {sizes['predicted']} bytes, allocated {sizes['allocated']}")
    return "\n".join(lines)
