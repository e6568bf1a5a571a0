"""``moe-engine serve``: starts the engine and the HTTP server from the flags, shuts both down.

The core process starts first (importing torch and loading weights take longest); meanwhile this process imports the
HTTP stack and the tokenizer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import shlex
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from moe_engine import logs
from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, EngineDeadError
from moe_engine.frontend.core_process import FAILED_CORE_SECONDS, CoreProcess
from moe_engine.frontend.start import frontend_settings, kill_cores, open_tokenizer, start_cores, stop_cores, wait_ready
from moe_engine.frontend.weights.delete_checkpoint import delete_checkpoint
from moe_engine.planning.inputs.cluster_env import ClusterPlace
from moe_engine.planning.output import explain
from moe_engine.planning.output.launch_flags import launch_flags
from moe_engine.planning.prepare import place_in_cluster, prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.processes.open_files import check_limit, raise_limit
from moe_engine.processes.unblocked_stream import unblocked
from moe_engine.server.listen import bind, url_host
from moe_engine.server.tls import Certificate
from moe_engine.tuning.doctor.memory_costs import LedgerCosts

if TYPE_CHECKING:
    from moe_engine.frontend.client_api import EngineInfo
    from moe_engine.server.settings import ServerSettings
    from moe_engine.server.state import ServerState
    from moe_engine.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("moe_engine")

ENGINE_DIED = 1
SWITCH_SECONDS = 0.0005
"""Longest time for which a thread that reads a request body keeps the interpreter from the thread that serves all
streams. Python's default is ten times as long."""
DEAD_ENGINE_GRACE_SECONDS = 1.0
"""Seconds for which the server still responds after the engine died, so that every client receives the error."""
DEAD_ENGINE_DRAIN_SECONDS = 5.0
"""Longest wait after that for clients that read or send too slowly: a supervisor waits for the server's end."""


def serve(args: EngineArgs) -> int:
    """Runs a server until SIGTERM, or until its engine dies.

    Returns:
        0 after a drain, 1 if the engine died. A second signal ends the process with 130 (SIGINT) or 1.

    Raises:
        ConfigError: a flag, the model's config, the checkpoint or the address is invalid.
        EngineDeadError: the engine failed while starting.
    """
    began = time.monotonic()
    logs.setup_logging(args.logging.log_level)
    raise_limit()
    place = place_in_cluster()
    try:
        config = prepare(args, place=place)
    except ConfigError as error:
        _report_to_node_0(args, place, error)
        raise
    if config.parallel.local_rank or config.parallel.node_rank:
        return _serve_node(config)
    if (certificate := Certificate.of(config.server)) is not None:
        certificate.check()
    sock = bind(config.server.host, config.server.port)
    cores: list[CoreProcess] = []
    try:
        cores = start_cores(config)
        for line in explain.start_lines(config):
            logger.info("%s", line)
        import uvloop

        from moe_engine.server.app import make_template  # slow import: overlaps with the core's loading

        tokenizer, settings = open_tokenizer(config), server_settings(config, sock.getsockname()[1])
        make_template(settings, tokenizer)  # a broken template fails before the weights are loaded
        info = wait_ready(cores)  # on the main thread, so that a signal interrupts it
        delete_checkpoint(config)
        sys.setswitchinterval(SWITCH_SECONDS)
        return uvloop.run(_serve(config, cores, info, tokenizer, settings, sock, began))
    finally:
        stop_cores(cores)
        sock.close()


def _report_to_node_0(args: EngineArgs, place: ClusterPlace | None, error: ConfigError) -> None:
    """Reports the error of another node to node 0, so that it does not wait for this node."""
    from moe_engine.cluster.node import report_refusal
    from moe_engine.planning.prepare import secret_of_nodes
    from moe_engine.processes.zmq_sockets import job_keys

    parallel = args.parallel
    node, address, local_rank = parallel.node_rank, parallel.dist_init_addr, 0
    if place is not None:
        node, address, local_rank = place.node_rank, address or place.leader_address, place.local_rank
    if node and not local_rank and address is not None:
        logger.error("%s", error)
        with suppress(ConfigError):  # the secret or the address may be wrong too
            report_refusal(address, job_keys(secret_of_nodes(args)), str(error))


def _serve_node(config: ResolvedConfig) -> int:
    """Runs a node without the HTTP server until node 0 stops it."""
    from moe_engine.cluster.node import run_node
    from moe_engine.executor.sharded_worker import rank_group_options

    plan = config.parallel
    if plan.local_rank:
        logger.info("Exiting: the first process of node %d starts all of its ranks", plan.node_rank)
        return 0
    options = rank_group_options(config)
    if options is None:
        raise ConfigError(f"--node-rank {plan.node_rank}: a single rank runs on a single node; start it on one")
    check_limit()
    for line in explain.start_lines(config):
        logger.info("%s", line)
    return run_node(config, options, config.logging.log_level)


async def _serve(
    config: ResolvedConfig,
    cores: list[CoreProcess],
    info: EngineInfo,
    tokenizer: Tokenizer | None,
    settings: ServerSettings,
    sock: socket.socket,
    began: float,
) -> int:
    from moe_engine.frontend.client import CoreClient
    from moe_engine.frontend.frontend import Frontend
    from moe_engine.frontend.pausing import Pausing
    from moe_engine.frontend.watchdog import watch
    from moe_engine.server.app import create_app
    from moe_engine.server.serve import http_config
    from moe_engine.server.serve import serve as serve_http
    from moe_engine.server.stop import SecondSignal, StopSwitch

    by_room = config.args.disaggregation.disaggregation_mode == "prefill"
    client = CoreClient(cores, info, config.load_balance_method, by_room=by_room)
    frontend = Frontend(client, tokenizer, settings.frontend)
    app = create_app(frontend, client, settings)
    switch, second = StopSwitch(), SecondSignal(partial(kill_cores, cores))

    def replica_died(cause: str) -> None:
        if client.cause_of_death() is not None:
            error = EngineDeadError(cause)
            switch.stop_after(DEAD_ENGINE_GRACE_SECONDS, DEAD_ENGINE_DRAIN_SECONDS, error)
        elif not client.closing:
            alive = ", ".join(str(rank) for rank, health in enumerate(client.healths()) if health.alive)
            logger.error("Serving continues with data-parallel rank %s; restart the server to have all again", alive)

    for core in cores:
        core.on_death(replica_died, asyncio.get_running_loop())
    watchdog = asyncio.create_task(watch(client, config.server.watchdog_timeout))
    watchdog.add_done_callback(partial(_report_failure, "The watchdog failed: stalled steps are no longer detected"))
    app.state.history.costs = LedgerCosts(config.args, config.machine)
    samples = asyncio.create_task(app.state.history.watch(app.state.server))
    samples.add_done_callback(partial(_report_failure, "/doctor failed: it takes no samples any more"))

    async def ready(host: str, port: int) -> None:
        gc.collect()
        gc.freeze()  # a full collection would scan tokenizer and modules, and delay tokens
        logger.info("%s", logs.READY_LINE)
        _announce(app.state.server, host, port, time.monotonic() - began)

    http = http_config(
        app,
        log_level=config.logging.log_level,
        log_level_http=config.logging.log_level_http,
        keep_alive_seconds=config.server.timeout_keep_alive,
        drain_seconds=config.server.timeout_graceful_shutdown,
        quiet_paths=tuple(config.logging.uvicorn_access_log_exclude_prefixes.split()),
        certificate=Certificate.of(config.server),
    )
    await serve_http(http, sock, on_ready=ready, on_stop=Pausing(frontend).end, stop=switch, second=second)
    watchdog.cancel()
    samples.cancel()
    await app.state.server.close()
    if app.state.tracing is not None and not second.has_come:
        await asyncio.to_thread(app.state.tracing.close)
    if client.cause_of_death() is not None and not second.has_come:
        await asyncio.to_thread(stop_cores, cores, FAILED_CORE_SECONDS)
        return ENGINE_DIED
    await client.shutdown(drain=not second.has_come)
    if second.has_come:
        logger.warning("Exiting without the answers of running requests: a second signal has come")
        second.exit()
    return 0


def _report_failure(message: str, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("%s", message, exc_info=error)


def _announce(state: ServerState, host: str, port: int, seconds: float) -> None:
    """Prints the READY line and an example command for interactive users."""
    key = '-H "Authorization: Bearer $API_KEY" ' if state.flags.api_key else ""
    path, example = example_request(state)
    body = json.dumps(example)
    scheme = "https://" if state.flags.ssl_certfile else ""
    url = shlex.quote(f"{scheme}{url_host(host)}:{port}{path}")
    out = unblocked(sys.stdout)
    with suppress(OSError):  # a full disk below the output does not end the server
        print(f"READY in {seconds:.1f} s on port {port}. Try:", file=out)
        print(f"  curl {url} -H 'Content-Type: application/json' {key}-d '{body}'", file=out, flush=True)


def example_request(state: ServerState) -> tuple[str, dict[str, Any]]:
    """Path and body of a request that this server answers."""
    question = "What is the capital of France?"
    if state.frontend.tokenizer is None:
        return ("/encode" if state.client.info.pooling else "/generate"), {"input_ids": [0, 1, 2]}
    if state.client.info.pooling is not None:
        return "/v1/embeddings", {"input": question}
    if state.chat_template is None:
        return "/v1/completions", {"prompt": "The capital of France is"}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": question}]}


def server_settings(config: ResolvedConfig, port: int) -> ServerSettings:
    """The HTTP server's part of the configuration. `port`: the bound one.

    Raises:
        ConfigError: a value in the checkpoint's generation_config.json is out of range.
    """
    from moe_engine.server.settings import ServerSettings, load_sampling_defaults

    defaults = load_sampling_defaults(config.model_path) if config.server.sampling_defaults == "model" else {}
    return ServerSettings(config.args, frontend_settings(config), defaults, launch_flags(config) | {"port": port})
