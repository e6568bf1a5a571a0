"""Compiles grammars in threads and keeps the last ones. One per engine core."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Lock

from moe_engine.processes.background import yield_to_steps, yielding
from moe_engine.structured_output.backend import CompiledGrammar, GrammarBackend
from moe_engine.types.constraint import Constraint

THREADS = 2
MAX_GRAMMARS = 256
MAX_SOURCE_CHARS = 16 << 20
"""Max source length of all grammars that are kept; a grammar's memory grows with its source."""


class GrammarCompiler:
    """Not thread-safe; its futures are completed by other threads.

    Args:
        open_backend: called once, in a thread, for the first grammar.
    """

    def __init__(self, open_backend: Callable[[], GrammarBackend]) -> None:
        self._open_backend = open_backend
        self._opening = Lock()
        self._kept: OrderedDict[tuple[str, str], Future[CompiledGrammar]] = OrderedDict()
        self._source_chars = 0

    def get(self, constraint: Constraint) -> Future[CompiledGrammar]:
        """The compiled grammar; done immediately if it is kept. Requests with the same grammar share a compilation."""
        key = constraint.key
        future = self._kept.get(key)
        if future is not None and not (future.done() and future.exception() is not None):
            self._kept.move_to_end(key)
            return future
        self._forget(key)
        future = self._kept[key] = self._threads.submit(self._compile, constraint)
        self._source_chars += len(constraint.source)
        while len(self._kept) > MAX_GRAMMARS or (self._source_chars > MAX_SOURCE_CHARS and len(self._kept) > 1):
            self._forget(next(iter(self._kept)))
        return future

    def _forget(self, key: tuple[str, str]) -> None:
        if self._kept.pop(key, None) is not None:
            self._source_chars -= len(key[1])

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        with self._opening:
            backend = self._backend
        with yielding():
            return backend.compile(constraint)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="grammars", initializer=yield_to_steps)

    @cached_property
    def _backend(self) -> GrammarBackend:
        return self._open_backend()
