"""Engine core process: builds worker and scheduler from the resolved configuration and serves until shutdown. With
--elastic-ep it only supervises the rank processes.

Run as ``python -m moe_engine.cluster.core_main`` by `core_process`, with the specification on standard input.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

import zmq

from moe_engine import logs
from moe_engine.cluster.core_spec import CoreSpec
from moe_engine.cluster.multiproc_executor import MultiprocExecutor
from moe_engine.cluster.rank_supervisor import RankSupervisor
from moe_engine.core import messages
from moe_engine.core.loop import EngineCore
from moe_engine.core.setup import engine_info, make_core
from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.transport import ZmqTransport
from moe_engine.errors import ConfigError, EngineDeadError
from moe_engine.executor.make_worker import make_worker
from moe_engine.models import registry
from moe_engine.planning.resolve import ResolvedConfig
from moe_engine.processes.child import read_spec
from moe_engine.processes.zmq_sockets import connect

logger = logging.getLogger("moe_engine")


def main() -> int:
    # torch's OpenMP threads would spin for milliseconds after each operator and take the CPU cores from our own
    # threads, the front end and other processes. Read at torch's import, so it must be set before.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    spec: CoreSpec = read_spec()
    config: ResolvedConfig = spec.config
    logs.setup_logging(config.logging.log_level)
    sys.path.extend(entry for entry in spec.import_path if entry not in sys.path)
    for architecture in spec.outside_models:  # before the ranks start, which get them from here
        registry.register(*architecture)
    ready: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    connect(ready, spec.ready_address)
    ranks: MultiprocExecutor | RankSupervisor | None = None
    try:
        ranks = _ranks(spec)
        if isinstance(ranks, RankSupervisor):
            started = ranks.start()
            transport = ZmqTransport(spec.to_core_of("supervisor"), spec.from_core_address)
            run: Callable[[], None] = partial(ranks.run, transport.send)
        else:
            core, transport, started = _build(spec, ranks)
            run = core.run
    except Exception as error:
        kind = "ConfigError" if isinstance(error, ConfigError) else type(error).__name__
        text = str(error) if isinstance(error, ConfigError) else f"engine core failed to start: {kind}: {error}"
        ready.send(messages.encode(messages.CoreFailed(text, kind, _details(error))))
        ready.close(5000)
        return _leave(ranks, 1)
    ready.send(messages.encode(started))
    ready.close(5000)
    # Objects created at startup live as long as the process: keep the garbage collector from scanning them in a step.
    gc.collect()
    gc.freeze()
    return _leave(ranks, _serve(run, transport))


def _ranks(spec: CoreSpec) -> MultiprocExecutor | RankSupervisor | None:
    """Starts the ranks of this process's model; None with a single rank."""
    config, options = spec.config, spec.ranks
    if options is None:
        return None
    level, supervised = config.logging.log_level, options.coverage is not None
    logs.setup_logging(level, "supervisor" if supervised else options.places[0].name)
    return (RankSupervisor if supervised else MultiprocExecutor)(config, options, spec, level)


def _leave(ranks: MultiprocExecutor | RankSupervisor | None, code: int) -> int:
    """Stops the other ranks, if any, and exits this process: one of its threads may hang in a collective."""
    if ranks is None:
        return code
    ranks.close()
    zmq.Context.instance().destroy(1000)
    os._exit(code)


def _details(error: Exception) -> str:
    """The traceback; empty for lost ranks, whose cause is in another process, and for user errors."""
    return "" if isinstance(error, EngineDeadError | ConfigError) else "".join(traceback.format_exception(error))


def _serve(run: Callable[[], None], transport: ZmqTransport) -> int:
    try:
        run()
    except Exception as error:
        logger.error("engine core stops: %s\n%s", error, _details(error))
        named = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
        transport.send(messages.CoreFailed(named))
        transport.close()
        return 1
    transport.close()
    return 0


def _build(spec: CoreSpec, group: MultiprocExecutor | None) -> tuple[EngineCore, ZmqTransport, messages.CoreReady]:
    config: ResolvedConfig = spec.config
    status = SharedStatus(spec.status_path)
    if group is None:
        worker = make_worker(config)
        transport = ZmqTransport(spec.to_core_address, spec.from_core_address, keys=spec.keys)
        core = make_core(config, worker, worker, transport, status)
        addresses = [transport.address]
    else:
        driver, worker = group.start()
        dp_sync = group.dp_sync()
        transport = ZmqTransport(spec.to_core_address, spec.from_core_address, group.exchange_socket, spec.keys)
        core = make_core(config, driver, worker, transport, status, check=group.check, dp_sync=dp_sync)
        addresses = [transport.address, *group.detector.core_addresses[1:]]
    status.write(ready=1, last_turn=time.monotonic())
    return core, transport, messages.CoreReady(engine_info(config, worker), addresses)


if __name__ == "__main__":
    sys.exit(main())
