"""Calls of the frontend on this core and its ranks: begun immediately, answered when their results are available."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from moe_engine.core import messages
from moe_engine.core.core_methods import CoreMethod
from moe_engine.core.executor import StepWorker
from moe_engine.core.rank_calls import RankCall, describe
from moe_engine.errors import EngineDeadError, MoeEngineError

PendingCall = Future[Any] | RankCall


class PendingCalls:
    """
    Args:
        methods: of this core.
        send: sends a reply to the frontend.
    """

    def __init__(
        self, worker: StepWorker, methods: Mapping[str, CoreMethod], send: Callable[[messages.Message], None]
    ) -> None:
        self._worker = worker
        self._methods = methods
        self._send = send
        self._begun: list[tuple[int, PendingCall]] = []

    def __len__(self) -> int:
        """Calls without a reply yet."""
        return len(self._begun)

    def begin(self, call: messages.Call) -> None:
        """Begins a call; replies if it ends immediately. Raises EngineDeadError if a rank is lost."""
        try:
            if call.on_ranks:
                self._begun.append((call.id, self._worker.call_ranks(call.method, call.args, call.deadline)))
                return
            method = self._methods.get(call.method)
            if method is None:
                raise MoeEngineError(f"unknown call {call.method!r}")
            value = method.call(call.args)
        except EngineDeadError:
            raise
        except Exception as error:
            self._send(messages.Reply(id=call.id, ok=False, value=f"{call.method}: {describe(error)}"))
            return
        if isinstance(value, Future):
            self._begun.append((call.id, value))
        else:
            self._send(messages.Reply(id=call.id, value=value))

    def answer(self) -> None:
        """Sends the replies of finished calls."""
        if not self._begun:
            return
        waiting: list[tuple[int, PendingCall]] = []
        for call_id, call in self._begun:
            reply = _reply_of(call_id, call)
            if reply is None:
                waiting.append((call_id, call))
            else:
                self._send(reply)
        self._begun = waiting


def _reply_of(call_id: int, call: PendingCall) -> messages.Reply | None:
    """The reply of a call that has ended, else None."""
    if isinstance(call, RankCall):
        answers = call.answers()
        return None if answers is None else messages.Reply(id=call_id, value=answers)
    if not call.done():
        return None
    error = call.exception()
    value = call.result() if error is None else describe(error)
    return messages.Reply(id=call_id, ok=error is None, value=value)
