"""Concurrent launches under Triton's interpreter: programs of kernels that wait for other programs, of one rank
or of several in this process.

Every program is a thread, and one thread runs at a time. When a kernel reads the clock or pauses, as in all waits, a
random other thread continues: programs start and interleave in any order. All programs of a launch are resident.
"""

from __future__ import annotations

import inspect
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import JITFunction
from triton.runtime import interpreter as triton_interpreter

from tests.kernels.triton import interpreter, memory_check

Builder = triton_interpreter.InterpreterBuilder


class _Thread(threading.local):
    """State of a thread that takes turns: its wake-up, and its grid and program."""

    turn: threading.Event
    place: tuple[tuple[int, ...], tuple[int, ...]] | None = None


_own = _Thread()


class Turns:
    """Threads that run one at a time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._waiting: list[threading.Event] = []
        self._looks = 0  # since a thread started or ended

    def run(self, functions: list[Callable[[], Any]]) -> list[Any]:
        """The functions' results; the caller, which may be one of the threads, waits. Raises the first error."""
        results, pending, caller = [None] * len(functions), set(range(len(functions))), threading.Event()
        errors: list[BaseException] = []

        def body(index: int, turn: threading.Event) -> None:
            _own.turn = turn
            self._wait(turn)
            self._looks = 0
            try:
                results[index] = functions[index]()
            except BaseException as error:
                errors.append(error)
            pending.discard(index)
            self._looks = 0
            if not pending:
                self._waiting.append(caller)
            self._continue_one()

        for index in range(len(functions)):
            turn = threading.Event()
            self._waiting.append(turn)
            threading.Thread(target=body, args=(index, turn), daemon=True).start()
        self._continue_one()
        self._wait(caller)
        if errors:
            raise errors[0]
        return results

    def switch(self) -> None:
        """Called by one of the threads: one of them continues, possibly the same. If all wait, other processes
        continue."""
        self._looks += 1
        if self._looks > 4 * len(self._waiting) + 4:
            time.sleep(0.001)
        self._waiting.append(_own.turn)
        self._continue_one()
        self._wait(_own.turn)
        _set_place()

    def _continue_one(self) -> None:
        self._waiting.pop(self._random.randrange(len(self._waiting))).set()

    def _wait(self, turn: threading.Event) -> None:
        turn.wait()
        turn.clear()


def run_ranks(functions: list[Callable[[], Any]], kernels: list[Any], seed: int) -> list[Any]:
    """Results of a function for each rank, run concurrently; all launches are of `kernels`. On a GPU the programs of
    one rank's launches run concurrently anyway."""
    if all(isinstance(kernel, JITFunction) for kernel in kernels):
        (function,) = functions
        return [function()]
    interpreter.install()
    turns, call = Turns(seed), triton_interpreter.GridExecutor.__call__
    scopes = [triton_interpreter._patch_lang(kernel.fn) for kernel in kernels]
    triton_interpreter.GridExecutor.__call__ = lambda executor, *args, **kwargs: _launch(executor, args, kwargs, turns)
    try:
        with _switching(turns):
            return turns.run(functions)
    finally:
        triton_interpreter.GridExecutor.__call__ = call
        for scope in reversed(scopes):
            scope.restore()


def run_launch(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> None:
    """`GridExecutor.__call__` over host memory, for a launch whose programs wait for other processes."""
    turns, scope = Turns(seed), triton_interpreter._patch_lang(executor.fn)
    try:
        with _switching(turns):
            _launch(executor, args, kwargs, turns)
    finally:
        scope.restore()


def _launch(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any], turns: Turns) -> None:
    names = inspect.getfullargspec(executor.fn)
    known = {key: x for key, x in kwargs.items() if key in names.args or key in names.kwonlyargs}
    given = inspect.getcallargs(executor.fn, *args, **known)
    convert = triton_interpreter._implicit_cvt
    converted = {name: x if name in executor.constexprs else convert(x) for name, x in given.items()}
    grid = tuple(executor.grid(given) if callable(executor.grid) else executor.grid)
    grid += (1,) * (3 - len(grid))

    launch = memory_check.launch_of(executor.fn, [*args, *kwargs.values()], kwargs.get("num_warps", 4))

    def run(place: tuple[int, ...]) -> None:
        _own.place = grid, place
        _set_place()
        with memory_check.in_launch(launch):
            executor.fn(**converted)

    places = itertools.product(*map(range, grid))
    turns.run([lambda place=place: run(place) for place in places])  # type: ignore[misc]
    launch.check_races()


def _set_place() -> None:
    """Sets the interpreter to this thread's program."""
    if _own.place is not None:
        grid, place = _own.place
        Builder.set_grid_dim(triton_interpreter.interpreter_builder, *grid)
        Builder.set_grid_idx(triton_interpreter.interpreter_builder, *place)


@contextmanager
def _switching(turns: Turns) -> Iterator[None]:
    """Context in which another thread continues when a kernel reads the clock or pauses."""
    clock = Builder.create_inline_asm

    def read(builder: Any, text: str, *rest: Any) -> Any:
        turns.switch()
        return clock(builder, text, *rest)

    Builder.create_inline_asm = read
    try:
        yield
    finally:
        Builder.create_inline_asm = clock
