"""Engine core process: builds worker and scheduler from the resolved configuration and serves until shutdown.

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
from typing import NoReturn

import zmq

from moe_engine import logs
from moe_engine.cluster.core_spec import REPORTED_FAILURE, CoreSpec
from moe_engine.cluster.multiproc_executor import Serving
from moe_engine.cluster.rank_loss import RankParent, policy_of
from moe_engine.core import messages
from moe_engine.core.rank_calls import SingleRank
from moe_engine.core.setup import engine_info, make_core
from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.transport import ZmqTransport
from moe_engine.errors import ConfigError, EngineDeadError
from moe_engine.executor.make_worker import make_worker
from moe_engine.models import registry
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.processes.child import read_spec
from moe_engine.processes.zmq_sockets import connect

logger = logging.getLogger("moe_engine")


def main() -> NoReturn:
    # torch's OpenMP threads would spin for milliseconds after each operator and take the CPU cores from the engine's
    # threads, the frontend and other processes. Read at torch's import, so it must be set before.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    spec: CoreSpec = read_spec()
    config: ResolvedConfig = spec.config
    logs.setup_logging(config.logging.log_level)
    sys.path.extend(entry for entry in spec.import_path if entry not in sys.path)
    for architecture in spec.outside_models:  # before the ranks start: they receive the models from this process
        registry.register(*architecture)
    ready: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    connect(ready, spec.ready_address)
    ranks: RankParent | None = None
    try:
        ranks = policy_of(spec.ranks).make_parent(spec, spec.ranks) if spec.ranks is not None else None
        serving = ranks.serve() if ranks is not None else _single(spec)
    except Exception as error:
        kind = "ConfigError" if isinstance(error, ConfigError) else type(error).__name__
        text = str(error) if isinstance(error, ConfigError) else f"engine core failed to start: {kind}: {error}"
        ready.send(messages.encode(messages.CoreFailed(text, kind, _details(error))))
        ready.close(5000)
        _leave(ranks, REPORTED_FAILURE)
    ready.send(messages.encode(serving.ready))
    ready.close(5000)
    # Objects created at startup live as long as the process: keep the garbage collector from scanning them in a step.
    gc.collect()
    gc.freeze()
    _leave(ranks, _serve(serving.run, serving.transport))


def _leave(ranks: RankParent | None, code: int) -> NoReturn:
    """Stops the other ranks, if any, and exits this process without the end of its interpreter: a thread may hang in a
    collective, and Triton prints lists of its types there."""
    if ranks is not None:
        ranks.close()
    zmq.Context.instance().destroy(1000)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the user's shell (`>&-`)
            stream.flush()
    os._exit(code)


def _details(error: Exception) -> str:
    """The traceback; empty for lost ranks, whose cause is in another process, and for user errors."""
    return "" if isinstance(error, EngineDeadError | ConfigError) else "".join(traceback.format_exception(error))


def _serve(run: Callable[[], None], transport: ZmqTransport) -> int:
    try:
        run()
    except Exception as error:
        details = _details(error)
        logger.error("engine core stops: %s%s", error, f"\n{details}" if details else "")
        named = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
        transport.send(messages.CoreFailed(named))
        transport.close()
        return REPORTED_FAILURE
    transport.close()
    return 0


def _single(spec: CoreSpec) -> Serving:
    """The core of a single rank."""
    config, status = spec.config, SharedStatus(spec.status_path)
    worker = make_worker(config)
    transport = ZmqTransport(spec.to_core_address, spec.from_core_address, keys=spec.keys)
    core = make_core(config, SingleRank(worker), worker, transport, status)
    status.write(ready=1, last_turn=time.monotonic())
    return Serving(core.run, transport, messages.CoreReady(engine_info(config, worker), [transport.address]))


if __name__ == "__main__":
    main()
