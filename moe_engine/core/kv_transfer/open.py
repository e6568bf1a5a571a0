"""Starts the transfer thread of a prefill or decode server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from moe_engine.core.kv_transfer.decode_agent import DecodeAgent
from moe_engine.core.kv_transfer.prefill_agent import PrefillAgent
from moe_engine.core.kv_transfer.schema import cache_schema
from moe_engine.core.kv_transfer.transports.protocol import TransportError
from moe_engine.errors import ConfigError, EngineDeadError
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.processes.addresses import LOOPBACK, network_address
from moe_engine.processes.zmq_sockets import job_keys
from moe_engine.scheduler.decode_tier import DecodeTier
from moe_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from moe_engine.worker.kv_cache.transfer_copies import TransferCopies
    from moe_engine.worker.worker import Worker


def open_transfers(
    config: ResolvedConfig,
    scheduler: Scheduler,
    worker: Worker,
    wake: Callable[[], None],
    check: Callable[[], None],
) -> Callable[[], None]:
    """The core's check of each iteration, which also applies what the thread reports.

    Raises:
        ConfigError: the bootstrap port cannot be bound.
    """
    tier, copies = scheduler.kv_cache.transfers, cast("TransferCopies", worker.runner.kv_copies)
    assert tier is not None
    flags = config.args.disaggregation
    port = flags.disaggregation_bootstrap_port
    schema, keys = cache_schema(config), job_keys(config.parallel.secret)
    more: dict[str, Any] = {"transport": flags.disaggregation_transfer_backend, "host": _reachable(config)}
    try:
        if isinstance(tier, DecodeTier):
            DecodeAgent(tier.link, copies, schema, port, keys, wake, **more)
        else:
            PrefillAgent(tier.link, copies, schema, f"tcp://{_address(config)}:{port}", keys, wake, **more)
    except TransportError as error:
        raise ConfigError(
            f"--disaggregation-transfer-backend {flags.disaggregation_transfer_backend}: {error}"
        ) from error

    def both() -> None:
        check()
        if tier.link.broken:
            raise EngineDeadError(tier.link.broken)
        tier.exchange(scheduler.kv_cache.step)

    return both


def _address(config: ResolvedConfig) -> str:
    """Where the prefill server listens: as its HTTP server does."""
    host = config.server.host
    return "*" if host in ("0.0.0.0", "::") else host


def _reachable(config: ResolvedConfig) -> str:
    """This server's address for the transports of its peers."""
    host = config.server.host
    return (network_address() or LOOPBACK) if host in ("0.0.0.0", "::") else host
