"""The frontend's client over several schedulers: routing, and the loss of replicas and groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from moe_engine.core import messages
from moe_engine.core.messages import AddRequest, RequestDelta
from moe_engine.core.rank_calls import RankAnswer
from moe_engine.core.shared_status import SharedStatus
from moe_engine.errors import EngineDeadError, InputError, RankLostError
from moe_engine.frontend.client import CoreClient
from moe_engine.frontend.client_api import CallError
from moe_engine.frontend.dp_routing import Load
from moe_engine.frontend.expert_records import ExpertRecords
from tests.server.fake_engine import INFO


class FakeCore:
    """A fake core of `groups` schedulers: reads their messages and sends their replies."""

    def __init__(self, folder: Path, name: str, groups: int) -> None:
        self.name = name
        self.keys = None
        self.from_core: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self.from_core.bind(f"ipc://{folder}/{name}-from")
        self.to_core_addresses = [f"ipc://{folder}/{name}-{group}" for group in range(groups)]
        self.statuses = [SharedStatus(folder / f"{name}-status-{group}", create=True) for group in range(groups)]
        self.dead: str | None = None
        self.stopped: float | None = None
        self._groups: dict[str, int] = {}
        self._lost: set[int] = set()
        """Groups of which the client has a loss: it sends them no more messages."""
        self._inboxes = [zmq.Context.instance().socket(zmq.PULL) for _ in range(groups)]
        for inbox, address in zip(self._inboxes, self.to_core_addresses):
            inbox.bind(address)
        self._got: list[list[messages.ToCore]] = [[] for _ in range(groups)]
        """Received and not yet taken by the test."""
        self._outbox: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._outbox.connect(f"ipc://{folder}/{name}-from")

    # -- used by the client

    def on_death(self, listener: Callable[[str], None], loop: Any) -> None:
        self._listener = listener

    def note_failure(self, message: str) -> None:
        self.dead = f"{self.name} failed: {message}"

    def kill(self, reason: str) -> None:
        self.die(f"{self.name} was killed: {reason}")

    def expect_exit(self) -> None: ...

    def stop(self, grace: float) -> None: ...

    def end(self, grace: float) -> None:
        """Returns after the message arrived, as a process that then ends. The client then drops unsent messages."""
        self.stopped = grace
        if self.dead is None:
            for group, inbox in enumerate(self._inboxes):
                if group not in self._lost:
                    inbox.poll(10_000)

    # -- used by the test

    async def got(self, group: int) -> messages.ToCore:
        while not self._got[group]:
            while not self._inboxes[group].poll(0):
                await asyncio.sleep(0.002)
            message = messages.decode_to_core(self._inboxes[group].recv())
            self._got[group] += message.requests if isinstance(message, messages.AddRequests) else [message]
        first = self._got[group].pop(0)
        if isinstance(first, AddRequest):
            self._groups[first.rid] = group
        return first

    def nothing_for(self, group: int) -> bool:
        return not self._got[group] and not self._inboxes[group].poll(20)

    def send(self, message: messages.Message) -> None:
        if isinstance(message, messages.GroupsLost):
            self._lost.update(message.groups)
        self._outbox.send(messages.encode(message))

    def bring(self, rid: str, tokens: list[int], *, end: bool = False) -> None:
        finish = {"type": "length", "length": len(tokens)} if end else None
        self.send(messages.StepOutput(deltas=[RequestDelta(rid, tokens, finish)], group=self._groups.get(rid, 0)))

    def die(self, cause: str) -> None:
        self.dead = self.dead or cause
        self._listener(self.dead)

    def close(self) -> None:
        for socket in (self.from_core, self._outbox, *self._inboxes):
            socket.close(0)


@asynccontextmanager
async def client_of(
    folder: Path, *groups: int, method: str = "total_tokens"
) -> AsyncIterator[tuple[CoreClient, list[FakeCore]]]:
    cores = [FakeCore(folder, f"core{i}", count) for i, count in enumerate(groups)]
    client = CoreClient(cores, INFO, method)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(240):
            yield client, cores
    finally:
        await client.shutdown(drain=False)
        for core in cores:
            core.close()


def request(rid: str, length: int = 3, lane: int | None = None) -> AddRequest:
    return AddRequest(rid, list(range(length)), {}, 8, seed=0, routed_dp_rank=lane)


def ask(client: CoreClient, *args: Any, **options: Any) -> asyncio.Task[list[int]]:
    async def tokens() -> list[int]:
        return [t async for delta in client.stream(request(*args, **options)) for t in delta.token_ids]

    return asyncio.create_task(tokens())


async def test_requests_are_routed_to_the_least_loaded_scheduler(tmp_path: Path) -> None:
    async with client_of(tmp_path, 2, 1) as (client, (first, second)):
        long = ask(client, "long", 100)
        assert (await first.got(0)).rid == "long"
        short = [ask(client, f"short{i}", 10) for i in range(4)]
        assert [(await first.got(1)).rid, (await second.got(0)).rid] == ["short0", "short1"]
        assert [(await first.got(1)).rid, (await second.got(0)).rid] == ["short2", "short3"]
        assert first.nothing_for(0)
        first.bring("long", [7] * 5)
        for i in range(4):
            (second if i % 2 else first).bring(f"short{i}", [i], end=True)
        assert await asyncio.gather(*short) == [[0], [1], [2], [3]]
        first.bring("long", [8], end=True)
        assert await long == [7] * 5 + [8]
        await asyncio.sleep(0)
        assert all(load.num_requests == load.num_tokens == 0 for load in client._router.loads)


async def test_requests_of_one_turn_of_the_event_loop_arrive_in_one_message(tmp_path: Path) -> None:
    """An idle scheduler else begins a step with the first one alone. An abort of one of them follows them."""
    async with client_of(tmp_path, 1) as (client, (core,)):
        tasks = [ask(client, f"r{i}") for i in range(5)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        while not core._inboxes[0].poll(0):
            await asyncio.sleep(0.002)
        together = messages.decode_to_core(core._inboxes[0].recv())
        assert isinstance(together, messages.AddRequests)
        assert [request.rid for request in together.requests] == [f"r{i}" for i in range(5)]
        aborted = await core.got(0)
        assert isinstance(aborted, messages.AbortRequest) and aborted.rids == ["r3"]
        later = ask(client, "later")
        assert (await core.got(0)).rid == "later"
        for rid in ("r0", "r1", "r2", "r3", "r4", "later"):
            core.bring(rid, [7], end=True)
        assert await asyncio.gather(*tasks[:3], tasks[4], later) == [[7]] * 5


async def test_requests_follow_their_prefix(tmp_path: Path) -> None:
    async with client_of(tmp_path, 2, method="cache_aware") as (client, (core,)):

        async def turn(rid: str, prompt: list[int], group: int, **fields: Any) -> list[int]:
            async def read() -> list[int]:
                asked = AddRequest(rid, prompt, {}, 8, seed=0, **fields)
                return [t async for delta in client.stream(asked) for t in delta.token_ids]

            task = asyncio.create_task(read())
            assert (await core.got(group)).rid == rid
            waiting = client._router.loads[group].num_uncomputed
            core.bring(rid, [5])
            core.bring(rid, list(range(70)), end=True)
            await task
            assert client._router.loads[group] == Load()
            return [waiting]

        prompt = list(range(100, 200))
        assert await turn("first", prompt, 0) == [100]
        assert await turn("other", [9] * 100, 1) == [100]
        prompt += [5, *range(70), *range(50)]
        assert await turn("second", prompt, 0) == [len(prompt) - 160]  # blocks of 32 tokens, answer included
        assert await turn("adapter", prompt, 1, lora_id=1, lora_key="a") == [len(prompt)]
        assert await turn("again", prompt, 0) == [len(prompt) % 32]
        flush = asyncio.create_task(client.call("flush_cache"))
        for group in (0, 1):
            core.send(messages.Reply(id=(await core.got(group)).id, value=True))
        await flush
        assert await turn("flushed", prompt, 1) == [len(prompt)]


async def test_request_with_a_dp_rank_is_routed_to_it(tmp_path: Path) -> None:
    async with client_of(tmp_path, 2, 2) as (client, (_, second)):
        task = ask(client, "there", 3, lane=3)
        assert (await second.got(1)).rid == "there"
        with pytest.raises(InputError, match=r"routed_dp_rank 4: this server has .*0 to 3"):
            await ask(client, "nowhere", 3, lane=4)
        second.bring("there", [1], end=True)
        await task
        second.die("core1 was killed by SIGKILL")
        with pytest.raises(RankLostError) as lost:
            await ask(client, "dead", 3, lane=2)
        others = "ranks 0, 1 serve on, leave routed_dp_rank out"
        assert str(lost.value) == f"data-parallel rank 2 was lost: core1 was killed by SIGKILL; {others}"


async def test_dead_replica_fails_only_its_own_requests(tmp_path: Path) -> None:
    async with client_of(tmp_path, 2, 1, method="round_robin") as (client, (first, second)):
        tasks = [ask(client, f"r{i}") for i in range(3)]
        await asyncio.gather(first.got(0), first.got(1), second.got(0))
        calls = asyncio.create_task(client.call("internal_state"))
        second.send(messages.Reply(id=(await second.got(0)).id, value={"of": 2}))
        assert client.cause_of_death() is None
        first.die("core0 was killed by SIGKILL")
        first.die("its exit, after its own report")
        again = "core0 was killed by SIGKILL; rank 2 serves on, send the request again"
        for rank, task in enumerate(tasks[:2]):
            with pytest.raises(RankLostError) as lost:
                await task
            assert str(lost.value) == f"data-parallel rank {rank} was lost: {again}"
        assert await calls == [{"of": 2}]
        second.bring("r2", [5], end=True)
        assert await tasks[2] == [5]
        assert client.cause_of_death() is None and client.health().alive
        assert [health.alive for health in client.healths()] == [False, False, True]
        after = ask(client, "after")
        assert (await second.got(0)).rid == "after"
        again = asyncio.create_task(client.call("internal_state"))
        second.send(messages.Reply(id=(await second.got(0)).id, value={"of": 2}))
        assert await again == [{"of": 2}]
        second.send(messages.CoreFailed("TP1 is lost"))
        with pytest.raises(EngineDeadError, match="core1 failed: TP1 is lost"):
            await after  # before its process has ended
        cause = "core0 was killed by SIGKILL; core1 failed: TP1 is lost"
        assert client.cause_of_death() == cause and not client.health().alive
        for attempt in (ask(client, "late"), asyncio.create_task(client.call("flush_cache"))):
            with pytest.raises(EngineDeadError, match=cause) as dead:
                await attempt
            assert not isinstance(dead.value, RankLostError)


async def test_calls_and_aborts_reach_every_scheduler(tmp_path: Path) -> None:
    async with client_of(tmp_path, 2, 1) as (client, (first, second)):
        call = asyncio.create_task(client.call("flush_cache", now=True))
        for core, group, value in ((second, 0, 3), (first, 1, 2), (first, 0, 1)):
            asked = await core.got(group)
            assert asked.method == "flush_cache" and asked.args == {"now": True}
            core.send(messages.Reply(id=asked.id, value=value))
        assert await call == [1, 2, 3]  # by scheduler, in any order of arrival
        tasks = [ask(client, f"r{lane}", lane=lane) for lane in range(3)]
        for core, group in ((first, 0), (first, 1), (second, 0)):
            await core.got(group)
        client.abort(["r0", "r2", "r", "another"], reason="enough")  # exactly these
        for core, group, rid in ((first, 0, "r0"), (second, 0, "r2")):
            abort = await core.got(group)
            assert (abort.rids, abort.reason) == ([rid], "enough")
            core.bring(rid, [], end=True)
        assert first.nothing_for(1)
        first.send(messages.StepOutput([RequestDelta("r1", [], {"type": "length", "length": 0})], group=1))
        await asyncio.gather(*tasks)


async def test_answers_of_ranks_count_if_another_scheduler_dies(tmp_path: Path) -> None:
    async with client_of(tmp_path, 1, 1) as (client, (first, second)):
        call = asyncio.create_task(client.ask_ranks("dump_experts"))
        await second.got(0)
        asked = await first.got(0)
        assert (asked.method, asked.on_ranks) == ("dump_experts", True)
        first.send(messages.Reply(id=asked.id, value=[RankAnswer(0, "a"), RankAnswer(1, error="b")]))
        second.die("core1 was killed by SIGKILL")
        found, lost = await call
        assert (found.replica, found.values, found.problems()) == (0, ["a"], {"replica 0 rank 1": "b"})
        assert (lost.replica, lost.lost, lost.values) == (1, "core1 was killed by SIGKILL", [])
        first.die("core0 was killed, too")
        with pytest.raises(EngineDeadError, match=r"core0 was killed, too"):
            await client.ask_ranks("dump_experts")


async def test_a_call_on_all_ranks_succeeds_without_a_replica_that_dies(tmp_path: Path) -> None:
    """It serves no request any more: a weight update, a pause or an adapter applies to the others."""
    async with client_of(tmp_path, 1, 1, 1) as (client, (first, second, third)):
        calls = asyncio.create_task(client.collective_rpc("stage_weights"))
        asked = await first.got(0)
        first.send(messages.Reply(id=asked.id, value=[RankAnswer(0, "a")]))
        second.die("core1 was killed by SIGKILL")
        third.send(messages.Reply(id=(await third.got(0)).id, value=[RankAnswer(0, "c")]))
        assert await calls == ["a", "c"]
        calls = asyncio.create_task(client.call("is_idle"))
        await first.got(0)
        await third.got(0)
        third.die("core2 was killed by SIGTERM")
        await asyncio.sleep(0)
        first.die("core0 was killed by SIGTERM")
        with pytest.raises(EngineDeadError, match=r"core0 .*; core1 .*; core2") as dead:
            await calls
        assert not isinstance(dead.value, RankLostError)


async def test_call_to_a_dead_scheduler_fails_at_once(tmp_path: Path) -> None:
    async with client_of(tmp_path, 1, 1) as (client, (first, second)):
        call = asyncio.create_task(client.ask_ranks("dump_experts"))
        await asyncio.sleep(0)  # it has chosen a scheduler, without a call so far
        second.die("core1 was killed by SIGKILL")
        first.send(messages.Reply(id=(await first.got(0)).id, value=[RankAnswer(0, "a")]))
        found, lost = await call
        assert found.values == ["a"] and lost.lost == "core1 was killed by SIGKILL"


async def test_a_call_on_all_ranks_has_one_error_with_the_failing_ranks(tmp_path: Path) -> None:
    async with client_of(tmp_path, 2, 1) as (client, (first, second)):

        async def answered(*errors: str) -> list[Any]:
            call = asyncio.create_task(client.collective_rpc("view_experts", lambda replica: {"of": replica}, 5.0))
            for core, group, rank, error in zip((first, first, second), (0, 1, 0), (0, 1, 0), errors):
                asked = await core.got(group)
                assert (asked.args, asked.deadline) == ({"of": int(core is second)}, 5.0)
                core.send(messages.Reply(id=asked.id, value=[RankAnswer(rank, "" if error else rank, error)]))
            return await call

        assert await answered("", "", "") == [0, 1, 0]
        with pytest.raises(CallError) as failed:
            await answered("no memory", "", "no memory")
        assert str(failed.value) == "view_experts: replica 0 rank 0, replica 1 rank 0: no memory"


async def test_a_scheduler_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_engine.frontend.client.GRACE_SECONDS", 0.1)
    async with client_of(tmp_path, 2) as (client, (core,)):
        call = asyncio.create_task(client.collective_rpc("view_experts", deadline=1.0))
        core.send(messages.Reply(id=(await core.got(1)).id, value=[RankAnswer(1)]))
        with pytest.raises(CallError, match=r"the engine: the scheduler of group 0 did not answer within 1 s"):
            await call


KILLED = "DP0 TP0 (pid 7) was killed by SIGKILL"


async def test_recording_starts_if_a_scheduler_is_lost(tmp_path: Path) -> None:
    async with client_of(tmp_path, 2) as (client, (core,)):
        start = asyncio.create_task(ExpertRecords(client).start())
        await core.got(0)
        core.send(messages.Reply(id=(await core.got(1)).id, value=[RankAnswer(1, True)]))
        core.send(messages.GroupsLost([0], KILLED))
        await start
        refused = asyncio.create_task(ExpertRecords(client).start())
        core.send(messages.Reply(id=(await core.got(1)).id, value=[RankAnswer(1, False)]))
        with pytest.raises(InputError, match="recording is off"):
            await refused
        assert core.nothing_for(1)


async def test_dump_covers_survivors_and_names_losses(tmp_path: Path) -> None:
    async with client_of(tmp_path, 2) as (client, (core,)):
        dump = asyncio.create_task(ExpertRecords(client).dump())
        await core.got(0)
        part = {"rank": 1, "path": "of-rank-1.pt"}
        core.send(messages.Reply(id=(await core.got(1)).id, value=[RankAnswer(1, part)]))
        core.send(messages.GroupsLost([0], KILLED))
        write = await core.got(1)
        assert write.method == "write_experts" and write.args == {"parts": [part]}
        core.send(messages.Reply(id=write.id, value=["of-rank-1.pt"]))
        done = await dump
        assert (done.paths, done.lost) == (["of-rank-1.pt"], [KILLED])


async def test_disconnect_aborts_at_the_requests_scheduler(tmp_path: Path) -> None:
    async with client_of(tmp_path, 2) as (client, (core,)):
        tasks = [ask(client, f"r{i}") for i in range(2)]
        await asyncio.gather(core.got(0), core.got(1))
        tasks[1].cancel()
        abort = await core.got(1)
        assert abort.rids == ["r1"] and core.nothing_for(0)
        core.bring("r0", [1], end=True)
        await tasks[0]


async def test_clients_that_leave_together_are_one_message_a_scheduler(tmp_path: Path) -> None:
    """A scheduler that gets them one by one would admit waiting ones to the rows of others."""
    async with client_of(tmp_path, 2) as (client, (core,)):
        tasks = [ask(client, f"r{i}", lane=i % 2) for i in range(41)]
        for i in range(41):
            await core.got(i % 2)
        for task in tasks[1:]:
            task.cancel()
        for group in (0, 1):
            abort = await core.got(group)
            assert sorted(abort.rids) == sorted(f"r{i}" for i in range(1, 41) if i % 2 == group)
            assert core.nothing_for(group)
        core.bring("r0", [1], end=True)
        assert await tasks[0] == [1]


async def test_health_is_aggregated(tmp_path: Path) -> None:
    async with client_of(tmp_path, 2, 1) as (client, (first, second)):
        first.statuses[0].write(ready=1, num_running=2, num_waiting=1, num_used_tokens=30)
        first.statuses[1].write(ready=1, num_running=3, num_used_tokens=5)
        assert not client.health().ready
        second.statuses[0].write(ready=1, num_waiting=4)
        health = client.health()
        assert health.ready and health.alive and health.dead is None
        assert (health.num_running, health.num_waiting, health.num_used_tokens) == (5, 5, 35)


async def test_only_a_stalled_replica_is_killed(tmp_path: Path) -> None:
    async with client_of(tmp_path, 1, 1) as (client, (first, second)):
        first.statuses[0].write(num_running=1)
        client.stop_stalled(lambda health: "no step for 300 s" if health.num_running else None)
        assert first.dead == "core0 was killed: no step for 300 s" and second.dead is None
        await client.shutdown()
        assert first.stopped is not None and second.stopped is not None
        assert isinstance(await second.got(0), messages.Shutdown)


async def test_what_no_core_answers_before_its_end_gets_an_error(tmp_path: Path) -> None:
    async with client_of(tmp_path, 1, 1) as (client, cores):
        tasks = [ask(client, f"r{lane}", lane=lane) for lane in range(2)]
        calls = [asyncio.create_task(client.call("internal_state")), asyncio.create_task(client.call_one("is_idle"))]
        for number in (0, 0, 0, 1, 1):
            await cores[number].got(0)
        cores[0].bring("r0", [5], end=True)
        assert await tasks[0] == [5]
        await client.shutdown()
        late = [ask(client, "late"), asyncio.create_task(client.call("flush_cache"))]
        for task in (tasks[1], *calls, *late):
            with pytest.raises(EngineDeadError, match=r"^this engine was shut down$"):
                await task
