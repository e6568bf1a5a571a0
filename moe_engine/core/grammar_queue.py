"""Requests of a core whose grammars are being compiled. The scheduler gets each when its grammar is ready."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future

from moe_engine.errors import InputError
from moe_engine.structured_output.backend import CompiledGrammar, GrammarError
from moe_engine.structured_output.compiler import GrammarCompiler
from moe_engine.types import Request

Ready = tuple[Request, Future[CompiledGrammar]]


class GrammarQueue:
    """
    Args:
        wake: called from a compiler's thread when a grammar is ready.
    """

    def __init__(self, compiler: GrammarCompiler | None, wake: Callable[[], None]) -> None:
        self._compiler = compiler
        self._wake = wake
        self._waiting: list[Ready] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> CompiledGrammar | None:
        """The grammar if it is ready: the request then does not wait here.

        Raises:
            InputError: the engine compiles no grammars, or not this one; 503: the system starts no thread for it.
        """
        assert request.sampling.constraint is not None
        if self._compiler is None:
            raise InputError("constraints are not available: this engine runs with --grammar-backend none")
        try:
            future = self._compiler.get(request.sampling.constraint)
        except RuntimeError as error:
            raise InputError(f"the grammar cannot be compiled: {error}; raise `ulimit -u`", status=503) from None
        if future.done():
            return grammar_of(request, future)
        self._waiting.append((request, future))
        future.add_done_callback(lambda _: self._wake())
        return None

    def requests(self) -> list[Request]:
        """Those that wait here."""
        return [request for request, _ in self._waiting]

    def take(self) -> list[Ready]:
        """Removes and returns the requests whose grammars are ready, or have failed, in order of arrival."""
        ready = [one for one in self._waiting if one[1].done()]
        if ready:
            self._waiting = [one for one in self._waiting if not one[1].done()]
        return ready

    def abort(self, rids: Collection[str] | None) -> list[str]:
        """Removes requests (None: all); returns the ids of those that waited here."""
        asked = None if rids is None else frozenset(rids)
        gone = [one for one in self._waiting if asked is None or one[0].rid in asked]
        self._waiting = [] if asked is None else [one for one in self._waiting if one[0].rid not in asked]
        return [request.rid for request, _ in gone]


def grammar_of(request: Request, future: Future[CompiledGrammar]) -> CompiledGrammar:
    """Raises InputError with the reason if the compilation failed."""
    assert request.sampling.constraint is not None
    try:
        return future.result()
    except GrammarError as error:
        raise InputError(f"{request.sampling.constraint.where}: {error}") from None
    except Exception as error:
        raise InputError(f"the grammar cannot be compiled: {type(error).__name__}: {error}", status=500) from None
