"""A core that has requests and plans no step: what the watchdog sees of it, and a grammar that is not ready."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_engine.core import messages
from moe_engine.core.loop import EngineCore, LoopSettings
from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.step_reporter import StepReporter
from moe_engine.sampling_checks import parse_sampling
from moe_engine.scheduler import Scheduler, SchedulerConfig
from moe_engine.structured_output.compiler import GrammarCompiler
from tests.engine.test_receive_loops import SteppingWorker

CONFIG = SchedulerConfig(num_slots=400, context_len=100, max_rows=6)


class Holds(Scheduler):
    """Admits nothing until `is_free`; `held`: because of held sessions; `loads`: while KV is loaded from host RAM."""

    is_free = False

    def __init__(self, held: bool = False, loads: int = 0, **limits: float) -> None:
        super().__init__(replace(CONFIG, **limits), lambda: time.monotonic())  # type: ignore[arg-type]
        self._held, self._loads = held, loads

    @property
    def num_loading(self) -> int:
        return 0 if self.is_free else self._loads

    @property
    def is_held_back(self) -> bool:
        return self._held and not self.is_free and bool(self.table.queue)

    def schedule(self, hold_prefill: bool = False):  # type: ignore[no-untyped-def]
        return super().schedule(hold_prefill) if self.is_free else None


class Port:
    """Delivers a request, then lets 100 s pass in each turn; from the tenth turn on the scheduler is free."""

    def __init__(
        self, scheduler: Holds, status: SharedStatus, monkeypatch: pytest.MonkeyPatch, **sampling: Any
    ) -> None:
        self._sampling, self.finish, self.end = sampling, dict[str, Any](), 0
        self.now, self.turns, self.ages, self.tokens = 1000.0, 0, list[float](), list[int]()
        self.num_waiting: list[int] = []
        self._scheduler, self._status = scheduler, status
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def receive(self, timeout: float) -> list[messages.Message]:
        self.turns += 1
        if self.turns == 1:
            sampling = msgspec.to_builtins(parse_sampling({"max_new_tokens": 4, "ignore_eos": True})) | self._sampling
            return [messages.AddRequest("a", [3, 4, 5], sampling, 4, seed=1)]
        if self.turns < 10:
            self.now += 100.0
            self.ages.append(self._status.read().step_age)
            self.num_waiting.append(self._status.read().num_waiting)
        assert self.turns < 40, "the request does not end"
        self._scheduler.is_free = self.turns >= 10
        return [messages.Shutdown()] if self.turns == 10 else []

    def wake(self) -> None: ...

    def send(self, message: messages.Message) -> None:
        assert isinstance(message, messages.StepOutput)
        self.tokens += [token for delta in message.deltas for token in delta.token_ids]
        self.finish, self.end = message.deltas[-1].finish or {}, self.turns


def run(port: Port, scheduler: Holds, status: SharedStatus, grammars: GrammarCompiler | None = None) -> None:
    worker, eos = SteppingWorker(CONFIG), frozenset((1,))
    EngineCore(scheduler, worker, port, status, StepReporter(), LoopSettings(eos), grammars=grammars).run()


@pytest.mark.parametrize(("held", "loads"), [(True, 0), (True, 1), (False, 0)])
def test_a_core_that_only_waits_is_not_stalled(
    held: bool, loads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that plans nothing without a reason is, and one whose load does not end."""
    scheduler, status = Holds(held, loads), SharedStatus(tmp_path / "status", create=True)
    port = Port(scheduler, status, monkeypatch)
    run(port, scheduler, status)
    assert len(port.tokens) == 4
    assert max(port.ages) == 0 if held and not loads else max(port.ages) >= 700.0


@pytest.mark.parametrize("paused", [False, True])
def test_the_status_shows_requests_that_only_wait(
    paused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that arrive during a pause of generation too: routers and metrics read the load there."""
    scheduler, status = Holds(held=not paused), SharedStatus(tmp_path / "status", create=True)
    if paused:
        scheduler.pause(retract=False)
    port = Port(scheduler, status, monkeypatch)
    run(port, scheduler, status)
    assert set(port.num_waiting[1:]) == {1} and len(port.tokens) == 4


class NeverReady(GrammarCompiler):
    def get(self, constraint: Any) -> Future[Any]:
        return Future()


def test_a_grammar_that_is_not_ready_has_the_limit_of_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, status = Holds(request_waiting_timeout=350.0), SharedStatus(tmp_path / "status", create=True)
    port = Port(scheduler, status, monkeypatch, constraint={"kind": "regex", "source": "[0-9]"})
    run(port, scheduler, status, NeverReady(lambda: pytest.fail("opened")))
    assert port.finish["status_code"] == 503 and "--request-waiting-timeout (350 s)" in port.finish["message"]
    assert 4 < port.end < 8 and scheduler.stats().waiting_timeouts_total == 1
