"""The receive loops of frontend and core, with arbitrary frames between valid messages: every valid request is
answered correctly, and if a loop ends, its requests end with the reason."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.core import messages
from moe_engine.core.core_methods import ExpertDumps
from moe_engine.core.loop import EngineCore, LoopSettings
from moe_engine.core.rank_calls import RankAnswer, RankCall
from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.step_reporter import StepReporter
from moe_engine.core.transport import ZmqTransport
from moe_engine.errors import EngineDeadError
from moe_engine.frontend import client as client_module
from moe_engine.frontend.inbox import Inbox
from moe_engine.scheduler import Scheduler, SchedulerConfig
from moe_engine.types import StepPlan, StepResult
from tests.distributed.engine.test_client import ask, client_of
from tests.engine.delayed_core import front_end
from tests.engine.test_request_ids import answer, asking, expected, settled
from tests.scheduler.simulator import FakeWorker, expected_outputs, make_request
from tests.server.fake_engine import INFO

CALL = messages.Call(id=3, method="flush_cache")
DELTA = messages.RequestDelta("unknown-7", [5], {"type": "length", "length": 1}, cached_tokens=2)
Noise = list[bytes]
"""The frames of one ZeroMQ message."""


def encoded(*impossible: messages.Message) -> st.SearchStrategy[Noise]:
    return st.sampled_from([[messages.encode(message)] for message in impossible])


@st.composite
def torn(draw: st.DrawFn, *true: messages.Message) -> Noise:
    """A valid message with bytes removed, changed or added."""
    data = bytearray(messages.encode(draw(st.sampled_from(true))))
    kind = draw(st.sampled_from(("cut", "change", "add")))
    place = draw(st.integers(0, len(data) - 1))
    if kind == "cut":
        return [bytes(data[:place])]
    if kind == "change":
        data[place] = draw(st.integers(0, 255))
        return [bytes(data)]
    return [bytes(data) + draw(st.binary(min_size=1, max_size=3))]


RANDOM = st.lists(st.binary(max_size=30), min_size=1, max_size=4)
SEVERAL = st.integers(2, 4).map(lambda count: [messages.encode(CALL)] * count)
TO_FRONT_END = st.one_of(
    RANDOM,
    SEVERAL,
    torn(messages.StepOutput([DELTA] * 2), messages.Reply(id=10**6, value=[1])),
    encoded(
        messages.StepOutput([DELTA], group=99),
        messages.StepOutput([DELTA], group=-1),
        messages.StepOutput([DELTA, DELTA]),
        messages.StepOutput([]),
        messages.GroupsLost([7, -1], "groups that there are not"),
        messages.Reply(id=10**6, value={"a": 1}),
        messages.Reply(id=10**6, ok=False, value=None),
        messages.CoreReady(INFO, []),
        CALL,
    ),
)
ADD = messages.AddRequest("noise-1", [5], {}, 3, seed=1)
TO_CORE = st.one_of(
    RANDOM,
    SEVERAL,
    torn(CALL, messages.AbortRequest(["noise-1", "noise-2"])),
    encoded(
        messages.AbortRequest(["unknown", "unknown", ""]),
        messages.Call(id=1, method="what"),
        messages.Call(id=2, method="expert_write"),
        messages.Call(id=3, method="expert_write", args={"parts": 5, "more": None}),
        messages.StepOutput([DELTA]),
        *(
            msgspec.structs.replace(ADD, **change)
            for change in (
                {"sampling": {"temperature": "hot"}},
                {"sampling": {"no_such_field": []}, "prompt_ids": []},
                {"max_new_tokens": -5},
                {"prompt_ids": []},
                {"prompt_ids": [5] * 300},
                {"generated_ids": [1, 2], "num_migrations": 9},
            )
        ),
    ),
)


@given(st.lists(st.lists(TO_FRONT_END, max_size=6), min_size=4, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_front_end_survives_arbitrary_frames(noise: list[list[Noise]], rng: random.Random) -> None:
    async def run(folder: Path) -> None:
        async with front_end(folder) as (frontend, client, core):
            lengths = [rng.randrange(1, 12) for _ in noise]
            tasks = []
            for number, frames in enumerate(noise):
                request = asking(None, number, max_new_tokens=lengths[number])
                tasks.append(asyncio.create_task(answer(frontend, request)))
                for parts in frames:
                    core.core._outbox.send_multipart(parts)
                await asyncio.sleep(0)
            async with asyncio.timeout(240):
                outs = await asyncio.gather(*tasks)
            for number, (out, length) in enumerate(zip(outs, lengths)):
                assert out["text"] == expected(number, length) and len(out["output_ids"]) == length
            await settled(core, frontend)
            assert client.health().alive and client.cause_of_death() is None and not client._inboxes

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


class SteppingWorker:
    """Implements `core.executor.StepWorker` over the simulated worker, whose tokens are a function of the prompt."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._worker = FakeWorker(config)

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        self._worker.submit(plan)
        done: Future[StepResult] = Future()
        done.set_result(self._worker.execute())
        return done

    def call_ranks(self, method: str, args: Mapping[str, Any], seconds: float) -> RankCall:
        call = RankCall([0], seconds)
        call.add(RankAnswer(0, method))
        return call


class RunningCore:
    """The real core and scheduler over a real port, on a separate thread."""

    def __init__(self, folder: Path) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.out = context.socket(zmq.PULL)
        self.out.bind(f"ipc://{folder}/from")
        self._port = ZmqTransport(f"ipc://{folder}/to", f"ipc://{folder}/from")
        self.into = context.socket(zmq.PUSH)
        self.into.connect(f"ipc://{folder}/to")
        config = SchedulerConfig(num_slots=400, context_len=100, max_rows=6)
        worker, status = SteppingWorker(config), SharedStatus(folder / "status", create=True)
        core = EngineCore(
            Scheduler(config),
            worker,
            self._port,
            status,
            StepReporter(),
            LoopSettings(frozenset((1,))),
            methods={"write_experts": ExpertDumps(folder / "dumps").method()},
        )
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(core.run,), daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        self.into.send(messages.encode(messages.Shutdown(drain=False)))
        self._thread.join(60)
        self._port.close()
        self.into.close(0)
        self.out.close(0)
        assert self.error is None and not self._thread.is_alive()


@given(st.lists(st.lists(TO_CORE, max_size=6), min_size=1, max_size=10), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_core_survives_arbitrary_frames(noise: list[list[Noise]], rng: random.Random) -> None:
    wanted: dict[str, list[int]] = {}
    found: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        core = RunningCore(Path(folder))
        try:
            for number, frames in enumerate(noise):
                prompt, length = [rng.randrange(2, 50) for _ in range(rng.randrange(1, 30))], rng.randrange(1, 20)
                request = make_request(f"true-{number}", prompt, length)
                wanted[request.rid] = expected_outputs(request)[0]
                sampling = msgspec.to_builtins(request.sampling)
                add = messages.AddRequest(request.rid, prompt, sampling, length, seed=number)
                core.into.send(messages.encode(add))
                for parts in frames:
                    core.into.send_multipart(parts)
            ended: set[str] = set()
            while not wanted.keys() <= ended:
                assert core.error is None and core.out.poll(60_000), (core.error, wanted.keys() - ended)
                message = messages.decode_from_core(core.out.recv())
                for delta in message.deltas if isinstance(message, messages.StepOutput) else ():
                    found.setdefault(delta.rid, []).extend(delta.token_ids)
                    ended |= {delta.rid} if delta.finish is not None else set()
        finally:
            core.close()
    assert {rid: found[rid] for rid in wanted} == wanted


async def test_failed_reader_fails_all_requests_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(tmp_path, 2, 1) as (client, (first, second)):
        tasks = [ask(client, f"r{lane}", lane=lane) for lane in range(3)]
        call = asyncio.create_task(client._call(client._endpoints[0], messages.Call(0, "internal_state")))
        await asyncio.gather(first.got(0), first.got(1), second.got(0))
        with monkeypatch.context() as broken:
            broken.setattr(Inbox, "take", lambda self, delta: 1 // 0)
            first.bring("r0", [5])
            for waiting in (tasks[0], tasks[1], call):  # also of the other group
                with pytest.raises(EngineDeadError, match=r"core0 failed: the frontend .*ZeroDivisionError"):
                    await asyncio.wait_for(waiting, 60)
        healths = client.healths()
        assert [health.alive for health in healths] == [False, False, True]
        assert "ZeroDivisionError" in (healths[0].dead or "") and first.dead == healths[0].dead
        second.bring("r2", [5], end=True)
        assert await tasks[2] == [5] and client.cause_of_death() is None
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            await ask(client, "late", lane=1)
        with monkeypatch.context() as broken:
            broken.setattr(Inbox, "take", lambda self, delta: 1 // 0)
            last = ask(client, "last")
            await second.got(0)
            second.bring("last", [5])
            with pytest.raises(EngineDeadError, match="core1 failed"):
                await asyncio.wait_for(last, 60)
        assert not client.health().alive and "core1 failed" in (client.cause_of_death() or "")


async def test_losing_the_last_group_ends_requests_and_not_the_reader(tmp_path: Path) -> None:
    async with client_of(tmp_path, 2) as (client, (core,)):
        tasks = [ask(client, f"r{lane}", lane=lane) for lane in range(2)]
        await asyncio.gather(core.got(0), core.got(1))
        core.send(messages.GroupsLost([0, 1], "both were killed"))
        for task in tasks:
            with pytest.raises(EngineDeadError, match="both were killed"):
                await asyncio.wait_for(task, 60)
        assert not any(reader.done() for reader in client._readers)


def test_backlog_of_steps_yields_to_other_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two turns of another task at most `BURST_DELTAS` and one step's deltas are handled."""
    handled, longest = 0, 0
    take = Inbox.take

    def counting(self: Inbox, delta: messages.RequestDelta) -> None:
        nonlocal handled
        handled += 1
        take(self, delta)

    monkeypatch.setattr(Inbox, "take", counting)
    monkeypatch.setattr(client_module, "BURST_DELTAS", 50)

    async def run() -> None:
        nonlocal handled, longest
        async with client_of(tmp_path, 1) as (client, (core,)):
            task = ask(client, "r")
            await core.got(0)
            for _ in range(100):
                core.send(messages.StepOutput([messages.RequestDelta("r", [1])] * 10))
            core.bring("r", [2], end=True)
            time.sleep(0.1)  # the loop is blocked meanwhile, and all messages arrive
            while not task.done():
                handled = 0
                await asyncio.sleep(0)
                longest = max(longest, handled)
            assert await task == [1] * 1000 + [2]

    asyncio.run(run())
    assert 0 < longest <= 60
