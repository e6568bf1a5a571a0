"""Trial compilations: prepared grammars, a compilation stopped at the time limit, one that crashes, and the next."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from moe_engine.core.grammar_queue import GrammarQueue
from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.errors import InputError, MoeEngineError
from moe_engine.frontend import grammar_checks
from moe_engine.frontend.grammar_checks import CheckChild, GrammarChecks
from moe_engine.processes import background, frame_child
from moe_engine.processes.frame_child import FrameChildren
from moe_engine.server.errors import problem_of
from moe_engine.structured_output.backend import PREPARED, GrammarSettings
from moe_engine.structured_output.check_process import CheckSpec
from moe_engine.structured_output.compiler import GrammarCompiler
from moe_engine.structured_output.open_backend import open_backend
from moe_engine.tokenizer.tokenizer import load_tokenizer
from moe_engine.types import Request, SamplingParams
from moe_engine.types.constraint import Constraint
from tests.structured_output.test_llguidance_backend import EOS, SIZE
from tests.waiting import until


def test_bound_and_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    source = load_tokenizer(CHECKPOINT_DIR).source
    assert source is not None
    spec = CheckSpec(GrammarSettings(), source, SIZE, (EOS,))
    checks, ask, numbers = GrammarChecks(spec), CheckChild.ask, iter((signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL))

    def hindered(child: CheckChild, constraint: Constraint) -> grammar_checks.Verdict:
        """The process hangs, or ends, when it gets the grammar."""
        number = next(numbers, None)
        monkeypatch.setattr(grammar_checks, "COMPILE_SECONDS", 0.2 if number is not None else 60.0)
        monkeypatch.setattr(frame_child, "STARVED_SECONDS", 0.2 if number is not None else 60.0)
        if number is not None:
            os.kill(child._popen.pid, number)
            os.waitid(os.P_PID, child._popen.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return ask(child, constraint)

    monkeypatch.setattr(CheckChild, "ask", hindered)
    try:
        for source, words, status in (
            ("a", r"^regex: .* no processor time to compile it", 503),
            ("b", "^regex: the compilation crashed", 400),
        ):
            with pytest.raises(InputError, match=words) as found:
                asyncio.run(checks.check(Constraint("regex", source, "regex")))
            assert found.value.status == status
        for source in ("a", "b"):  # neither is kept as its verdict
            passed = asyncio.run(checks.check(Constraint("regex", source, "regex")))
            assert (passed.kind, passed.where) == (PREPARED, "regex")
        with pytest.raises(InputError, match=r"^regex: unclosed group at character 2 of"):
            asyncio.run(checks.check(Constraint("regex", "a(b", "regex")))
    finally:
        checks.close()


def test_a_slow_grammar_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = load_tokenizer(CHECKPOINT_DIR).source
    assert source is not None
    checks = GrammarChecks(CheckSpec(GrammarSettings(), source, SIZE, (EOS,)))
    monkeypatch.setattr(grammar_checks, "COMPILE_SECONDS", 0.0)
    try:
        with pytest.raises(InputError, match=r"^regex: the compilation takes longer than 0 s") as found:
            asyncio.run(checks.check(Constraint("regex", "([a-z]{0,999}[0-9]{0,999}){0,99}", "regex")))
        assert found.value.status == 400
    finally:
        checks.close()


def test_a_check_without_requests_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of clients that left kept later grammars waiting. One that runs goes on: its result is kept."""
    source = load_tokenizer(CHECKPOINT_DIR).source
    assert source is not None
    checks = GrammarChecks(CheckSpec(GrammarSettings(), source, SIZE, (EOS,)))
    go, asked = threading.Event(), list[str]()

    def ask(self: GrammarChecks, constraint: Constraint) -> grammar_checks.Verdict:
        asked.append(constraint.source)
        assert go.wait(60)
        return grammar_checks.Verdict()

    monkeypatch.setattr(GrammarChecks, "_ask", ask)

    async def main() -> None:
        run, left, stays = (
            [asyncio.create_task(checks.check(Constraint("regex", name, "regex"))) for name in names]
            for names in ("ab", "ccd", "de")
        )
        while len(asked) < 2:
            await asyncio.sleep(0.01)
        for task in [*run, *left]:
            task.cancel()
        await asyncio.gather(*run, *left, return_exceptions=True)
        again = asyncio.create_task(checks.check(Constraint("regex", "c", "regex")))
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*stays, again)
        for name in "ab":
            await checks.check(Constraint("regex", name, "regex"))

    try:
        asyncio.run(main())
        assert sorted(asked[:2]) == ["a", "b"] and sorted(asked[2:]) == ["c", "d", "e"]
        assert not checks._running
    finally:
        checks.close()


def test_a_process_yields_once_it_is_ready() -> None:
    """Not while it starts: with a low priority from its beginning it took minutes on a machine without idle time."""
    source = load_tokenizer(CHECKPOINT_DIR).source
    assert source is not None
    child = CheckChild(CheckSpec(GrammarSettings(), source, SIZE, (EOS,)))
    try:
        own, tasks = os.getpriority(os.PRIO_PROCESS, 0), f"/proc/{child.pid}/task"
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == own
        child.begin()
        assert child.ask(Constraint("regex", "a", "regex")).prepared is not None
        levels = {os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir(tasks)}
        assert max(levels) == min(own + background.NICENESS, 19)
    finally:
        child.kill()


@pytest.mark.parametrize("size", [1, 1 << 20], ids=["small", "larger than a pipe"])
def test_a_process_stopped_by_a_signal_is_replaced(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    source = load_tokenizer(CHECKPOINT_DIR).source
    assert source is not None
    checks = GrammarChecks(CheckSpec(GrammarSettings(), source, SIZE, (EOS,)))
    ask, asked = CheckChild.ask, list[int]()

    def stopped(child: CheckChild, constraint: Constraint) -> grammar_checks.Verdict:
        if not asked:
            os.kill(child.pid, signal.SIGSTOP)
        asked.append(child.pid)
        return ask(child, constraint)

    monkeypatch.setattr(frame_child, "HELD_SECONDS", 0.3)
    monkeypatch.setattr(grammar_checks, "COMPILE_SECONDS", 60.0)
    monkeypatch.setattr(CheckChild, "ask", stopped)
    schema = '{"enum": ["a"], "description": "%s"}' % ("x" * size)
    try:
        assert asyncio.run(checks.check(Constraint("json_schema", schema, "schema"))).kind == PREPARED
        assert len(set(asked)) == 2
    finally:
        checks.close()


@pytest.mark.parametrize(("killed", "fatal", "status"), [(1, "SIGKILL", None), (2, "SIGKILL", 503), (2, "exit", 500)])
def test_a_process_that_ends_at_its_start(
    monkeypatch: pytest.MonkeyPatch, killed: int, fatal: str, status: int | None
) -> None:
    """A second one takes its place; if that ends too, the error names the end, and later grammars work."""
    source = load_tokenizer(CHECKPOINT_DIR).source
    assert source is not None
    # tests of servers share started processes
    monkeypatch.setattr(grammar_checks, "children_for", lambda spec: FrameChildren(lambda: CheckChild(spec)))
    checks, begin = GrammarChecks(CheckSpec(GrammarSettings(), source, SIZE, (EOS,))), CheckChild.begin
    begun: list[int] = []

    def ends(child: CheckChild) -> None:
        begun.append(child.pid)
        if len(begun) <= killed and fatal == "SIGKILL":
            os.kill(child.pid, signal.SIGKILL)
        elif len(begun) <= killed:
            child.exchange(b"no pickle", 60.0)
        begin(child)

    monkeypatch.setattr(CheckChild, "begin", ends)
    try:
        if status is not None:
            how = "was killed by SIGKILL" if fatal == "SIGKILL" else "exited with code 1"
            with pytest.raises(
                MoeEngineError, match=f"^the process that checks grammars {how} before it was ready"
            ) as e:
                asyncio.run(checks.check(Constraint("regex", "a", "regex")))
            assert problem_of(e.value).status == status and len(begun) == 2
        assert asyncio.run(checks.check(Constraint("regex", "a", "regex"))).kind == PREPARED
        assert len(set(begun)) == killed + 1
    finally:
        checks.close()


class Mortal:
    """A child process that ends when it is asked, `deaths` times in all."""

    deaths = 0

    def __init__(self) -> None:
        self.is_alive = True

    def begin(self) -> None: ...

    def kill(self) -> None:
        self.is_alive = False

    def ask(self) -> int:
        if Mortal.deaths:
            Mortal.deaths -= 1
            self.is_alive = False
            raise EOFError
        return id(self)


def test_a_killed_process_is_replaced_once() -> None:
    made: list[Mortal] = []

    def make() -> Mortal:
        made.append(Mortal())
        return made[-1]

    children: FrameChildren[Any] = FrameChildren(make)
    first = children.call(Mortal.ask)
    assert children.call(Mortal.ask) == first and len(made) == 1
    Mortal.deaths = 1
    assert children.call(Mortal.ask) == id(made[1]) != first
    Mortal.deaths = 2
    with pytest.raises(EOFError):
        children.call(Mortal.ask)
    assert children.call(Mortal.ask) == id(made[-1]) and len(made) == 4
    children.close()
    Mortal.deaths = 1
    with pytest.raises(EOFError):  # and starts no process
        children.call(Mortal.ask)
    assert not Mortal.deaths


def test_idle_processes_that_were_stopped_together() -> None:
    """A signal to the process groups of all idle processes: the call takes a new one after the first failure."""

    class Idle(Mortal):
        stopped = False

        def ask(self) -> int:
            if self.stopped:
                raise EOFError
            return id(self)

    children: FrameChildren[Any] = FrameChildren(Idle)
    with children.borrow() as one, children.borrow() as other:
        pass
    one.stopped = other.stopped = True
    assert children.call(Idle.ask) not in (id(one), id(other))
    children.close()


def test_a_core_outlives_the_limit_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The RuntimeError of a thread that the system does not start ended the core."""
    tokenizer = load_tokenizer(CHECKPOINT_DIR)
    queue = GrammarQueue(
        GrammarCompiler(lambda: open_backend(GrammarSettings(), tokenizer, SIZE, (EOS,))), lambda: None
    )
    sampling = SamplingParams(constraint=Constraint("regex", "a", "regex"))
    request = Request(rid="r", prompt_ids=[1], sampling=sampling, max_new_tokens=1)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refused)
        with pytest.raises(InputError, match=r"can't start new thread; raise `ulimit -u`") as found:
            queue.add(request)
    assert found.value.status == 503 and not len(queue)
    assert queue.add(request) is None
    until(queue.take, "no grammar")
