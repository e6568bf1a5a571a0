"""SGLang's sessions: a request continues, branches off or rewrites an earlier request of its session.

A client sends only the new tokens of a conversation; the tokens before them are kept here, as a tree of turns. The
radix cache has the KV of earlier turns, as for any prompt: a session reserves no KV memory.
"""

from __future__ import annotations

import time
import uuid
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moe_engine.errors import InputError
from moe_engine.frontend.generation import Generation
from moe_engine.frontend.session_params import SessionParams
from moe_engine.frontend.session_turns import Joined, Session, Turn

MAX_TOKENS = 2**24
"""Max tokens kept by all sessions, 8 bytes each. Beyond it, the sessions used longest ago are removed."""
MAX_SESSIONS = 2**16
SWEEP_SECONDS = 1.0
"""Interval of the search for sessions that timed out."""


class Sessions:
    """All open sessions of a frontend.

    Args:
        bos_id: token that begins a prompt; not repeated after an earlier turn.
        clock: seconds.
    """

    def __init__(
        self,
        bos_id: int | None = None,
        *,
        max_tokens: int = MAX_TOKENS,
        max_sessions: int = MAX_SESSIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bos_id = bos_id
        self._open: OrderedDict[str, Session] = OrderedDict()
        self._max_tokens, self._max_sessions, self._clock = max_tokens, max_sessions, clock
        self._swept_at = clock()
        self.size = 0
        """Tokens of all open sessions."""

    def __len__(self) -> int:
        return len(self._open)

    def open(self, session_id: str | None = None, *, streaming: bool = False, timeout: float | None = None) -> str:
        """Opens a session and returns its id. `timeout`: seconds without a request after which it closes.

        Raises:
            InputError: a session with this id is open.
        """
        self._sweep()
        name = session_id or uuid.uuid4().hex
        if (same := self._open.get(name)) is not None and not self._has_timed_out(same):
            raise InputError.at("session_id", f"session {name!r:.80} is open already; close it, or use another id")
        self.close(name)
        self._open[name] = Session(name, streaming, timeout, self._clock())
        self._make_room()
        return name

    def close(self, session_id: str) -> bool:
        """Deletes a session; its running requests continue. False: it was not open."""
        session = self._open.pop(session_id, None)
        self.size -= session.size if session is not None else 0
        return session is not None

    def join(self, params: SessionParams, ids: list[int]) -> tuple[list[int], Joined]:
        """The whole prompt of a request whose new tokens are `ids`. Changes nothing.

        Raises:
            InputError: names the field.
        """
        session = self._session(params)
        parent = _last_turn(session, params) if session.streaming else _earlier_turn(session, params)
        replace = bool(params.replace)
        if parent is None:
            return ids, Joined(session, None, 0, replace)
        keep = parent.keep + len(parent.own)
        if not params.drop_previous_output:
            keep += len(parent.answer())
        if params.offset:
            keep = slice(None, params.offset).indices(keep)[1]
        new = ids[1:] if keep and ids[0] == self._bos_id else ids
        if not new:
            raise InputError.at("session_params", "the request adds no token to its session")
        return parent.prefix(keep) + new, Joined(session, parent, keep, replace)

    def begin(self, generation: Generation) -> list[str]:
        """Registers a sequence that starts now. Returns the ids of running requests that it replaces.

        Raises:
            InputError: its session was closed meanwhile, or is a streaming one with a running request.
        """
        joined = generation.session
        if joined is None:
            return []
        session, ended = joined.session, list[str]()
        if self._open.get(session.id) is not session:
            raise _not_open(session.id)
        if session.streaming and session.num_running:
            raise InputError.at(
                "session_params.id", f"a request of streaming session {session.id!r:.80} is running; wait for its end"
            )
        keep = min(joined.keep, len(generation.prompt_ids))
        own = array("q", generation.prompt_ids[keep:])
        turn = Turn(generation.rid, joined.parent, keep, own, array("q"), generation)
        with self._counted(session):
            if joined.replace:
                ended = session.forget(joined.parent)
                if joined.parent is not None and joined.parent.running is not None:
                    ended.append(joined.parent.rid)
                joined.replace = False  # the other sequences of the request stay
            if not session.streaming:
                session.add(turn)
        session.num_running += 1
        generation.turn = turn
        return ended

    def end(self, generation: Generation) -> None:
        """Keeps the output of a sequence that has ended. Safe to call twice."""
        turn, joined = generation.turn, generation.session
        if turn is None or joined is None:
            return
        session, generation.turn = joined.session, None
        turn.output, turn.running = array("q", generation.output_ids), None
        turn.rank = generation.request.routed_dp_rank
        session.num_running -= 1
        session.used_at = self._clock()
        with self._counted(session):
            if not session.streaming:
                session.size += len(turn.output) if session.turns.get(turn.rid) is turn else 0
            elif generation.finish is not None and generation.finish["type"] != "abort":
                session.add(turn)
        self._make_room()

    @contextmanager
    def _counted(self, session: Session) -> Iterator[None]:
        before = session.size
        yield
        if self._open.get(session.id) is session:
            self.size += session.size - before

    def _session(self, params: SessionParams) -> Session:
        self._sweep()
        if not params.id:
            raise InputError.at("session_params.id", "is required; /open_session returns it")
        session = self._open.get(params.id)
        if session is None or self._has_timed_out(session):
            raise _not_open(params.id)
        session.used_at = self._clock()
        self._open.move_to_end(session.id)
        return session

    # -- limits

    def _has_timed_out(self, session: Session) -> bool:
        if session.timeout is None or session.num_running:
            return False
        return self._clock() - session.used_at > session.timeout

    def _sweep(self) -> None:
        if self._clock() - self._swept_at < SWEEP_SECONDS:
            return
        self._swept_at = self._clock()
        for session in [one for one in self._open.values() if self._has_timed_out(one)]:
            self.close(session.id)

    def _make_room(self) -> None:
        """Removes the sessions used longest ago; keeps the session used last, and sessions with running requests."""
        if self.size <= self._max_tokens and len(self._open) <= self._max_sessions:
            return
        for session in list(self._open.values())[:-1]:
            if not session.num_running:
                self.close(session.id)
            if self.size <= self._max_tokens and len(self._open) <= self._max_sessions:
                return


def _last_turn(session: Session, params: SessionParams) -> Turn | None:
    for name in ("replace", "drop_previous_output", "offset"):
        if getattr(params, name):
            where = f"session_params.{name}"
            raise InputError.at(where, "a streaming session only appends; leave it out")
    return next(reversed(session.turns.values()), None)


def _earlier_turn(session: Session, params: SessionParams) -> Turn | None:
    if params.rid is None:
        return None
    turn = session.turns.get(params.rid)
    if turn is None:
        raise InputError.at(
            "session_params.rid",
            f"session {session.id!r:.80} has no request {params.rid!r:.80}; give the id in the "
            "meta_info of an earlier answer",
        )
    if turn.running is not None and not params.replace:
        raise InputError.at(
            "session_params.rid", f"request {params.rid!r:.80} is running; wait for its end, or set replace"
        )
    return turn


def _not_open(session_id: str) -> InputError:
    return InputError.at(
        "session_params.id",
        f"session {session_id!r:.80} is not open; it was closed, timed out, was replaced by newer "
        "ones, or the server has restarted",
    )
