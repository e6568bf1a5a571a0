"""Leader of a check (node 0): collects the nodes, has them test their links, runs the trial engine, evaluates."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from moe_engine.cli.cluster_check import facts
from moe_engine.cli.cluster_check.engine_trial import EngineProcess, ask, trial_flags
from moe_engine.cli.cluster_check.links import Listener, try_links
from moe_engine.cli.cluster_check.report import NodeReport, Report
from moe_engine.cli.cluster_check.wire import (
    BrokenLink,
    Channel,
    ConnectionLost,
    End,
    EngineEnded,
    Hello,
    LinksTried,
    Peer,
    StartEngine,
    TryLinks,
)
from moe_engine.errors import ConfigError

PROGRESS_SECONDS = 5.0
LINK_SECONDS = 30.0
"""Time for a node to test all its links: each takes a few seconds at most, many run concurrently."""
END_SECONDS = 15.0
"""Time for every node's part of the engine to exit after the server."""


@dataclass(frozen=True)
class Plan:
    """Parameters of a check.

    Args:
        leader_address: ``host:port`` of node 0; None with one node.
        hosts: node names by rank, as far as known in advance.
        engine_seconds: time for the engine to become ready; 0 skips the engine.
    """

    num_nodes: int
    leader_address: str | None
    hosts: Sequence[str]
    join_seconds: float
    engine_seconds: float

    @property
    def host(self) -> str:
        return self.leader_address.rpartition(":")[0].strip("[]") if self.leader_address else "127.0.0.1"

    @property
    def port(self) -> int:
        return int(self.leader_address.rpartition(":")[2]) if self.leader_address else 0


class Leader:
    def __init__(self, plan: Plan, log: Callable[[str], None] = print) -> None:
        self._plan, self._log = plan, log
        hosts = [*plan.hosts, *[""] * plan.num_nodes]
        self._report = Report([NodeReport(rank, hosts[rank]) for rank in range(plan.num_nodes)])
        self._channels: dict[int, Channel] = {}
        self._ports: dict[int, list[int]] = {}
        self._came = asyncio.Event()

    async def run(self) -> Report:
        """Raises ConfigError: the address cannot be bound."""
        own = facts.gather()
        self._met(0, own, time.time())
        listener = await self._listen()
        free = await Listener.open(listener.family, 0)
        self._ports[0] = [listener.port, free.port]
        try:
            await self._join()
            self._compare()
            if self._plan.num_nodes > 1:
                await self._links()
        finally:
            listener.close()  # the engine uses the same port
            free.close()
        if self._report.ok and self._plan.engine_seconds:
            await self._engine()
        for channel in self._channels.values():
            with contextlib.suppress(ConnectionLost):
                await channel.send(End(self._report.ok))
        return self._report

    # -- joining

    async def _listen(self) -> Listener:
        plan = self._plan
        try:
            family = socket.getaddrinfo(plan.host, plan.port, type=socket.SOCK_STREAM)[0][0]
            return await Listener.open(family, plan.port, self._hello)
        except OSError as error:
            raise ConfigError(f"node 0 cannot listen on {plan.leader_address}: {error.strerror or error}") from None

    async def _hello(self, channel: Channel, hello: Hello) -> None:
        rank = hello.node_rank
        if not 0 < rank < self._plan.num_nodes or rank in self._channels:
            why = "twice" if rank in self._channels else f"of {self._plan.num_nodes}"
            who = f"{hello.facts.host} joined as node {rank} {why}"
            self._report.problems.append(f"{who}: give each node its own --node-rank, from 0")
            await channel.send(End(False))
            channel.close()
            return
        self._channels[rank], self._ports[rank] = channel, hello.ports
        self._met(rank, hello.facts, time.time())
        self._came.set()

    def _met(self, rank: int, node: facts.NodeFacts, now: float) -> None:
        report = self._report.nodes[rank]
        report.host, report.facts = node.host, node
        report.problems += [*node.problems, *(facts.clock_problem(node, now) if rank else ())]

    async def _join(self) -> None:
        began, patience = time.monotonic(), self._plan.join_seconds
        while missing := [node for node in self._report.nodes[1:] if node.rank not in self._channels]:
            waited = time.monotonic() - began
            if waited > patience:
                why = f"it is down, its process did not start, or it cannot reach node 0 at {self._plan.leader_address}"
                for node in missing:
                    node.problems.append(f"did not join within {patience:g} s: {why} (see its own output)")
                return
            self._came.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(PROGRESS_SECONDS, patience - waited + 0.01)):
                    await self._came.wait()
                continue
            self._log(f"waiting for {', '.join(node.name for node in missing)}")

    def _compare(self) -> None:
        present = {node.rank: node.facts for node in self._report.nodes if node.facts is not None}
        for rank, found in facts.differences(present).items():
            self._report.nodes[rank].problems += found

    # -- links

    async def _links(self) -> None:
        peers = [
            Peer(rank, channel.peer_address, self._ports[rank]) for rank, channel in sorted(self._channels.items())
        ]
        own = Peer(0, self._plan.host, self._ports[0])

        async def other(rank: int, channel: Channel) -> LinksTried:
            await channel.send(TryLinks([own, *(peer for peer in peers if peer.node_rank != rank)]))
            return await channel.receive(LinksTried, LINK_SECONDS)

        tries: dict[int, Awaitable[LinksTried]] = {0: try_links(peers)}
        tries.update((rank, other(rank, channel)) for rank, channel in self._channels.items())
        for rank, result in zip(tries, await asyncio.gather(*tries.values(), return_exceptions=True)):
            node = self._report.nodes[rank]
            if isinstance(result, ConnectionLost):
                self._lost(rank, f"while testing its links: {result}")
            elif isinstance(result, BaseException):
                raise result
            else:
                node.slowest_link = result.slowest
                self._broken(node, result.broken)

    def _broken(self, node: NodeReport, links: Sequence[BrokenLink]) -> None:
        """Adds one problem per node that `node` cannot reach, with the tested ports."""
        for other in sorted({link.to for link in links}):
            to, tried = self._report.nodes[other], [link for link in links if link.to == other]
            node.bad_link = to.bad_link = True
            ports = " and ".join(str(link.port) for link in tried)
            reasons = "; ".join(dict.fromkeys(link.reason for link in tried))
            self._report.problems.append(f"link {node.name} -> {to.name} port {ports}: {reasons}")

    def _lost(self, rank: int, when: str) -> None:
        self._report.nodes[rank].problems.append(f"lost {when}")
        self._channels.pop(rank).close()

    # -- the engine

    async def _engine(self) -> None:
        """Starts all parts at once; stops all when the question is answered or the first part fails."""
        plan = self._plan
        flags = trial_flags(plan.num_nodes, plan.leader_address, max(1, int(plan.engine_seconds)))
        port = _free_port()
        self._log(f"starting the embedded model on {plan.num_nodes} CPU ranks, one per node")
        for channel in self._channels.values():
            with contextlib.suppress(ConnectionLost):  # detected below
                await channel.send(StartEngine(flags))
        engine = await EngineProcess.start(flags, 0, port)
        parts = {rank: asyncio.create_task(self._part(rank)) for rank in self._channels}
        question = asyncio.create_task(ask(engine, port, plan.engine_seconds))
        try:
            await asyncio.wait([question, *parts.values()], return_when=asyncio.FIRST_COMPLETED)
            if not question.done():  # a part exited early; give the engine time to report the reason
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(END_SECONDS):
                        await asyncio.shield(question)
            wrong = question.result() if question.done() else "a part of the engine exited early"
        finally:
            question.cancel()
            await engine.stop()
        own = await engine.ended()
        if parts:
            await asyncio.wait(parts.values(), timeout=END_SECONDS)
        self._judge(wrong, own, parts)

    async def _part(self, rank: int) -> EngineEnded | str:
        """How a node's part exited, or why the node was lost."""
        try:
            return await self._channels[rank].receive(EngineEnded)
        except ConnectionLost as error:
            return str(error)

    def _judge(self, wrong: str, own: EngineEnded, parts: dict[int, asyncio.Task[EngineEnded | str]]) -> None:
        ends: dict[int, EngineEnded] = {0: own}
        for rank, part in parts.items():
            node, result = self._report.nodes[rank], part.result() if part.done() else None
            part.cancel()
            if isinstance(result, EngineEnded):
                ends[rank] = result
                continue
            node.engine, node.engine_failed = "lost" if result else "hangs", True
            if result:
                self._lost(rank, f"while the engine ran: {result}")
            else:
                node.problems.append(f"its part of the engine did not exit within {END_SECONDS:g} s after the server")
        for rank, end in sorted(ends.items(), reverse=True):  # node 0's log has the most information: shown last
            node = self._report.nodes[rank]
            node.engine, node.engine_failed = f"exit code {end.code}" if end.code else "ok", bool(end.code)
            if end.code:
                self._report.log, self._report.log_of = end.tail, node.name
        if wrong:
            self._report.problems.append(wrong)
        elif self._report.log:
            self._report.problems.append("the engine answered, but did not shut down cleanly")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
