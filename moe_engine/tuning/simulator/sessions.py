"""Recorded sessions: the turns of a trace, each sent after the previous answer and its pause.

Lines of a session have the same ``session_id``; ``delay`` (milliseconds) is the pause after the answer. Without
``delay`` a turn keeps its recorded distance from the turn before, but waits for the answer. `link_sessions` finds
sessions in a trace without ids by their text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_engine.tuning.simulator.traces import BLOCKS_FROM, MOONCAKE_BLOCK
from moe_engine.tuning.simulator.workload import Arrival, Numbers, answer_tokens

ANSWERS_FROM = 1 << 48


@dataclass(frozen=True)
class _Turn:
    """`gap`: recorded seconds after the previous turn; `continues`: its prompt begins with the previous prompt and
    answer."""

    arrival: Arrival
    gap: float
    continues: bool


class Recorded:
    """Implements `Workload`. Requests without a session depend on no answer."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self.total = len(arrivals)
        self._starts: list[Arrival] = []
        self._rest: dict[int, deque[_Turn]] = {}
        last: dict[int, Arrival] = {}
        numbers = Numbers(ANSWERS_FROM)
        for arrival in arrivals:
            session = arrival.conversation
            before = last.get(session) if session >= 0 else None
            if session >= 0:
                arrival.answer_ids = numbers.take(arrival.output_len + 1)
                last[session] = arrival
            if before is None:
                self._starts.append(arrival)
                continue
            arrival.turn = before.turn + 1
            turn = _Turn(arrival, max(arrival.seconds - before.seconds, 0.0), _continues(before, arrival))
            self._rest.setdefault(session, deque()).append(turn)
        self._starts.sort(key=lambda arrival: arrival.seconds)

    @property
    def waits(self) -> bool:
        """Whether a request waits for the answer to another one."""
        return bool(self._rest)

    def first(self) -> Iterator[Arrival]:
        return iter(self._starts)

    def after(self, arrival: Arrival, finished: float) -> Arrival | None:
        rest = self._rest.get(arrival.conversation)
        if not rest:
            return None
        turn = rest.popleft()
        follower = turn.arrival
        if turn.continues:
            known = len(arrival.prompt_ids) + arrival.output_len
            answer = answer_tokens(arrival.answer_ids, 0, arrival.output_len)
            follower.prompt_ids = [*arrival.prompt_ids, *answer, *follower.prompt_ids[known:]]
        if follower.pause is None:
            follower.seconds = max(finished, arrival.seconds + turn.gap)
        else:
            follower.seconds = finished + follower.pause
        return follower


def _continues(before: Arrival, after: Arrival) -> bool:
    """True if the prompt is long enough for the previous prompt with its answer, and no other text is recorded for
    it."""
    if len(after.prompt_ids) < len(before.prompt_ids) + before.output_len:
        return False
    whole = len(before.prompt_ids) // MOONCAKE_BLOCK * MOONCAKE_BLOCK
    hashed = after.prompt_ids[0] >= BLOCKS_FROM
    return not hashed or after.prompt_ids[:whole] == before.prompt_ids[:whole]


def link_sessions(arrivals: list[Arrival]) -> None:
    """Assigns sessions to requests without one. A request is the next turn of the request whose text is its longest
    prefix in whole blocks, if no other request follows that request and its answer fits. Other requests start a
    session, possibly with the text of another session, as a sub-agent does. A start without a new block (only a shared
    system prompt) has no turns.
    """
    arrivals.sort(key=lambda arrival: arrival.seconds)
    next_session = 1 + max((arrival.conversation for arrival in arrivals), default=-1)
    seen: set[int] = set()
    open_turns: dict[int, Arrival] = {}
    for arrival in arrivals:
        if arrival.conversation >= 0:
            continue
        keys = _block_keys(arrival.prompt_ids)
        found = next((key for key in reversed(keys) if key in open_turns), None)
        before = open_turns[found] if found is not None else None
        if before is not None and len(arrival.prompt_ids) >= len(before.prompt_ids) + before.output_len:
            arrival.conversation = before.conversation
            del open_turns[found]  # type: ignore[arg-type]
            open_turns[keys[-1]] = arrival
        else:
            arrival.conversation, next_session = next_session, next_session + 1
            if keys and keys[-1] not in seen:
                open_turns[keys[-1]] = arrival
        seen.update(keys)


def _block_keys(prompt: list[int]) -> list[int]:
    """A key of the text up to the end of each whole block."""
    keys: list[int] = []
    key = 0
    for end in range(MOONCAKE_BLOCK, len(prompt) + 1, MOONCAKE_BLOCK):
        key = hash((key, prompt[end - MOONCAKE_BLOCK], prompt[end - 1]))
        keys.append(key)
    return keys
