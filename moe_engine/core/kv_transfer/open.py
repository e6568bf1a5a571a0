"""Starts the transfer threads of a prefill or decode server: one on each rank, commanded by the group's scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from moe_engine.core.executor import StepWorker
from moe_engine.core.kv_transfer.agent import AgentSetup
from moe_engine.core.kv_transfer.decode_agent import DecodeAgent
from moe_engine.core.kv_transfer.directory import Home
from moe_engine.core.kv_transfer.group_link import FollowerLink, GroupLink
from moe_engine.core.kv_transfer.layout import Layout
from moe_engine.core.kv_transfer.prefill_agent import PrefillAgent
from moe_engine.core.kv_transfer.schema import cache_schema
from moe_engine.core.kv_transfer.transports.protocol import TransportError
from moe_engine.core.kv_transfer.transports.table import open_transport
from moe_engine.errors import ConfigError, EngineDeadError
from moe_engine.models.config import GQAConfig
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.processes.addresses import LOOPBACK, network_address, own_address_towards
from moe_engine.processes.rendezvous_address import host_of
from moe_engine.processes.runtime_dir import RuntimeDir
from moe_engine.processes.zmq_sockets import job_keys
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.scheduler.tiers.transfer_link import TransferLink
from moe_engine.scheduler.tiers.transfer_tier import TransferTier

if TYPE_CHECKING:
    from moe_engine.worker.kv_cache.transfer_copies import TransferCopies
    from moe_engine.worker.worker import Worker

JOIN_SECONDS = 60.0


def open_transfers(
    config: ResolvedConfig,
    scheduler: Scheduler,
    worker: Worker,
    driver: StepWorker,
    wake: Callable[[], None],
    check: Callable[[], None],
    group: int,
) -> Callable[[], None]:
    """The core's check of each iteration, which also applies what the thread reports.

    Args:
        group: attention group among those of all replicas.

    Raises:
        ConfigError: the bootstrap port cannot be bound, or the transport does not start.
    """
    tier = scheduler.kv_cache.transfers
    assert tier is not None
    tier.state_rows = cast("TransferCopies", worker.runner.kv_copies).state_rows
    layout = layout_of(config)
    if layout.num_ranks == 1:
        _start(config, worker, tier.link, wake, group, 0)
        return with_transfers(check, tier, scheduler, wake)
    folder = RuntimeDir()
    keys = job_keys(config.parallel.secret)
    sends = config.args.disaggregation.disaggregation_mode == "prefill"
    link = GroupLink(tier.link, layout, sends, _group_address(config, folder), keys, wake)
    _start(config, worker, link.own, link.wake, group, 0)
    pending = [driver.call_ranks("join_transfers", {"address": link.address}, JOIN_SECONDS)]

    def joined() -> None:
        if pending and (answers := pending[0].answers()) is not None:
            pending.clear()
            if wrong := [found.error for found in answers if found.error]:
                raise EngineDeadError(f"--disaggregation-mode: a rank cannot transfer KV: {wrong[0]}")
        check()

    joined.folder = folder  # type: ignore[attr-defined]  # as long as the core
    return with_transfers(joined, tier, scheduler, wake)


def follow_transfers(config: ResolvedConfig, worker: Worker, group: int, rank: int) -> None:
    """Prepares a follower, number `rank` of its attention group, to join its leader."""
    copies = worker.runner.kv_copies
    if not hasattr(copies, "on_join"):
        return

    def join(address: str) -> None:
        link = FollowerLink(rank, address, job_keys(config.parallel.secret))
        _start(config, worker, link.own, link.wake, group, rank)
        link.start()

    copies.on_join = join  # type: ignore[union-attr]


def with_transfers(
    check: Callable[[], None], tier: TransferTier, scheduler: Scheduler, wake: Callable[[], None]
) -> Callable[[], None]:
    """The core's check, extended to apply reports. It runs before the core's wait. If it changes anything, the core
    plans immediately and does not wait."""

    def both() -> None:
        check()
        if tier.link.broken:
            raise EngineDeadError(tier.link.broken)
        changes = bool(tier.link.reports)
        tier.exchange(scheduler.kv_cache.step)
        if changes:
            wake()

    return both


def _start(
    config: ResolvedConfig, worker: Worker, link: TransferLink, wake: Callable[[], None], group: int, rank: int
) -> None:
    flags, copies = config.args.disaggregation, cast("TransferCopies", worker.runner.kv_copies)
    port, backend = flags.disaggregation_bootstrap_port, flags.disaggregation_transfer_backend
    keys, layout = job_keys(config.parallel.secret), layout_of(config)
    opener = partial(open_transport, backend, _reachable(config), devices=flags.disaggregation_ib_device or "")
    setup = AgentSetup(link, copies, cache_schema(config), keys, wake, opener, layout)
    try:
        if flags.disaggregation_mode == "decode":
            DecodeAgent(setup, port, rank)
        else:
            home = _home(config, group, rank)
            address = f"tcp://{_bound(config)}:{'*' if home.bootstrap else port}"
            PrefillAgent(setup, address, home)
    except TransportError as error:
        raise ConfigError(f"--disaggregation-transfer-backend {backend}: {error}") from error


def layout_of(config: ResolvedConfig) -> Layout:
    """The ranks of an attention group: each has all of MLA's latent; KV heads are divided, and replicated if there are
    more ranks than heads (not with layers of different numbers of heads: planning refuses it)."""
    ranks, kinds = config.parallel.topology.attn_tp_size, config.model.attentions
    counts = {kind.num_kv_heads for kind in kinds if isinstance(kind, GQAConfig)}
    if not counts:
        return Layout(ranks)
    heads = math.lcm(*counts)
    return Layout(ranks, min(ranks, heads), heads)


def _home(config: ResolvedConfig, group: int, rank: int) -> Home:
    """Rank 0 of group 0 is at the bootstrap port; the others register there."""
    num_groups = config.parallel.num_groups
    if group == rank == 0:
        return Home(num_groups)
    plan, port = config.parallel, config.args.disaggregation.disaggregation_bootstrap_port
    if plan.num_nodes == 1:
        bound = _bound(config)
        return Home(num_groups, group, rank, f"tcp://{LOOPBACK if bound == '*' else bound}:{port}")
    leader = host_of(plan.leader_address or "")
    advertised = "" if plan.node_rank == 0 else own_address_towards(leader)
    return Home(num_groups, group, rank, f"tcp://{leader}:{port}", advertised)


def _bound(config: ResolvedConfig) -> str:
    """The address on which a prefill server listens: that of its HTTP server; all addresses for ranks of other
    nodes."""
    host = config.server.host
    return "*" if host in ("0.0.0.0", "::") or config.parallel.node_rank else host


def _group_address(config: ResolvedConfig, folder: RuntimeDir) -> str:
    plan = config.parallel
    if plan.num_nodes == 1:
        return f"ipc://{folder.path}/transfers"
    return f"tcp://{own_address_towards(host_of(plan.leader_address or ''))}:*"


def _reachable(config: ResolvedConfig) -> str:
    """This server's address for the transports of its peers."""
    host = config.server.host
    wide = host in ("0.0.0.0", "::") or config.parallel.node_rank
    return (network_address() or LOOPBACK) if wide else host
