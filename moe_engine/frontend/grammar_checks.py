"""Trial compilations of requests' grammars before the engine gets them: a wrong or slow one is a 400 of its request.

The engine gets the grammar in the library's form, so that its own compilation holds the GIL for no longer than a token.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from moe_engine.errors import InputError
from moe_engine.processes.frame_child import FrameChild, FrameChildren
from moe_engine.structured_output.check_process import CheckSpec, Verdict
from moe_engine.structured_output.request import read_constraint
from moe_engine.types.constraint import Constraint

COMPILE_SECONDS = 10.0
START_SECONDS = 120.0
PROCESSES = 2
MAX_VERDICTS = 8192
MAX_CHARS = 64 << 20
"""Max number of prepared grammars that are kept."""
MAX_WAITING = 256
_decode = msgspec.msgpack.Decoder(Verdict).decode
CRASHED = Verdict("the compilation crashed; make it simpler")


@dataclass(slots=True)
class _Check:
    """A compilation that waits or runs."""

    task: Future[Verdict]
    future: asyncio.Future[Verdict]
    """The same in the event loop."""
    num_requests: int = 0
    """That wait for it."""


class GrammarChecks:
    """Compiles grammars in child processes, started on demand and killed at the time limit. Results are cached; a
    compilation that has not begun is dropped when its last request is cancelled.

    Args:
        spec: None: no checks; the engine refuses grammars that it cannot compile.
    """

    def __init__(self, spec: CheckSpec | None) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._children = None if spec is None else children_for(spec)
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._kept_chars = 0
        self._running: dict[bytes, _Check] = {}

    async def check(self, constraint: Constraint) -> Constraint:
        """The constraint for the engine, with the same grammar.

        Raises:
            InputError: the grammar cannot be compiled, or not within `COMPILE_SECONDS`. 503: too many wait, the
                process got no processor time, was not ready in time, or was killed at its start, twice.
            GenerationError: the process does not start.
        """
        if self._children is None:
            return await asyncio.to_thread(read_constraint, constraint) if constraint.unread else constraint
        key = sha256("\0".join(constraint.key).encode()).digest()
        if key not in self._verdicts:
            try:
                verdict = await self._wait(key, self._running.get(key) or self._begin(key, constraint))
            except EOFError:  # not kept: the processes may have been killed for another reason
                verdict = CRASHED
        else:
            self._verdicts.move_to_end(key)
            verdict = self._verdicts[key]
        if verdict.problem is not None:
            raise InputError.at(constraint.where, verdict.problem)
        return verdict.prepared or constraint

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._children is not None:
            self._children.close()

    async def _wait(self, key: bytes, check: _Check) -> Verdict:
        check.num_requests += 1
        try:
            return await asyncio.shield(check.future)
        finally:
            check.num_requests -= 1
            if not check.num_requests and check.task.cancel():
                del self._running[key]

    def _begin(self, key: bytes, constraint: Constraint) -> _Check:
        if len(self._running) >= MAX_WAITING:
            raise InputError("too many grammars wait for compilation; try again later", status=503)
        self._threads = self._threads or ThreadPoolExecutor(PROCESSES, thread_name_prefix="grammar checks")
        task = self._threads.submit(self._ask, constraint)
        check = self._running[key] = _Check(task, asyncio.wrap_future(task))
        check.future.add_done_callback(lambda done: self._ended(key, done))
        return check

    def _ended(self, key: bytes, done: asyncio.Future[Verdict]) -> None:
        if done.cancelled():
            return
        del self._running[key]
        if done.exception() is None:
            self._verdicts[key] = done.result()
            self._kept_chars += _chars(done.result())
            while len(self._verdicts) > MAX_VERDICTS or (self._kept_chars > MAX_CHARS and len(self._verdicts) > 1):
                self._kept_chars -= _chars(self._verdicts.popitem(last=False)[1])

    def _ask(self, constraint: Constraint) -> Verdict:
        """Sends a grammar to a child process; blocks until its answer. Raises EOFError: two processes have crashed."""
        assert self._children is not None
        return self._children.call(lambda child: child.ask(constraint))


def children_for(spec: CheckSpec) -> FrameChildren[CheckChild]:
    return FrameChildren(lambda: CheckChild(spec))


def _chars(verdict: Verdict) -> int:
    return 0 if verdict.prepared is None else len(verdict.prepared.source)


class CheckChild(FrameChild):
    """A process that compiles grammars."""

    def __init__(self, spec: CheckSpec) -> None:
        super().__init__("moe_engine.structured_output.check_process", "the process that checks grammars")
        self._spec = spec

    def begin(self) -> None:
        """Raises InputError, 503: it is not ready in time. EOFError: it has ended."""
        if self.exchange(pickle.dumps(self._spec), START_SECONDS) is None:
            raise InputError(f"{self.name} was not ready within {START_SECONDS:g} s; try again", status=503)

    def ask(self, constraint: Constraint) -> Verdict:
        """Raises EOFError: the process has crashed. InputError, 503: others used the processors all the time."""
        answer = self.exchange(msgspec.msgpack.encode(constraint), COMPILE_SECONDS)
        if answer is None:
            self.kill()
            if self.is_starved:  # not a verdict, which would be kept
                raise InputError.at(
                    constraint.where,
                    "other work of the machine left no processor time to compile it; try again",
                    status=503,
                )
            return Verdict(f"the compilation takes longer than {COMPILE_SECONDS:g} s; make it simpler")
        return _decode(answer)
