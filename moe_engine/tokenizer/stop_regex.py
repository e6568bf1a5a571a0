"""Stop patterns (`stop_regex`): an output ends where a match of a regular expression ends for the first time.

The patterns are Python's, compiled to a nondeterministic automaton whose states are followed in parallel: a character
takes time proportional to the pattern, whatever the text. Python's own engine tries alternatives one after the other,
for a time that may double with every character. What an automaton cannot do (backreferences, assertions about the text
around) is refused by name.

Source: the module `re` parses the pattern; the construction is Thompson's (Comm. ACM 11(6), 1968).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]  # the parser has no public name
from typing import Any

from moe_engine.errors import InputError

MAX_STATES = 512
"""Maximum states of one pattern, after its repeats are written out."""
MAX_KEPT = 50_000
"""States in the successors that are kept, per pattern: about 3 MB."""
_ONE = {_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN}
_REPEATS = {_constants.MAX_REPEAT, _constants.MIN_REPEAT}
_REFUSED = {
    _constants.GROUPREF: "a backreference",
    _constants.GROUPREF_EXISTS: "a conditional group",
    _constants.ASSERT: "a lookahead or lookbehind",
    _constants.ASSERT_NOT: "a negative lookahead or lookbehind",
    _constants.AT: r"an anchor (^, $, \A, \Z, \b, \B)",
    _constants.ATOMIC_GROUP: "an atomic group",
    _constants.POSSESSIVE_REPEAT: "a possessive repeat",
}
States = frozenset[int]


class StopRegex:
    """A compiled pattern. `start`: the states before the first character, `end`: the state of a complete match.

    Raises:
        ValueError: what is wrong with the pattern.
    """

    def __init__(self, pattern: str) -> None:
        try:
            parsed: Any = _parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        self.pattern = pattern
        self._parsed = parsed
        self._edges: list[tuple[re.Pattern[str], int] | None] = []
        """By state: what a character must match, and the next state."""
        self._free: list[list[int]] = []
        """By state: states reached without a character."""
        self.end = self._state()
        begin = self._sequence(parsed, self.end)
        self.start = self._closure([begin])
        if self.end in self.start:
            raise ValueError("matches the empty text; an output would end before its first token")
        self._next: dict[tuple[States, str], States] = {}
        self._num_kept = 0

    def after(self, states: States, char: str) -> States:
        """The states after one more character; a match may begin at every character."""
        found = self._next.get((states, char))
        if found is None:
            reached = [edge[1] for state in states if (edge := self._edges[state]) is not None and edge[0].match(char)]
            found = self._closure(reached) | self.start
            if self._num_kept > MAX_KEPT:
                self._next, self._num_kept = {}, 0
            self._next[states, char] = found
            self._num_kept += len(found)
        return found

    def _state(self) -> int:
        if len(self._edges) >= MAX_STATES:
            raise ValueError(f"needs more than {MAX_STATES} states; make its repeats shorter")
        self._edges.append(None)
        self._free.append([])
        return len(self._edges) - 1

    def _sequence(self, items: Iterable[Any], end: int) -> int:
        """The state from which the items lead to `end`."""
        for op, value in reversed(list(items)):
            end = self._item(op, value, end)
        return end

    def _item(self, op: Any, value: Any, end: int) -> int:
        if op in _REFUSED:
            raise ValueError(f"has {_REFUSED[op]}, which is not supported in stop patterns")
        if op in _ONE:
            state = self._state()
            self._edges[state] = self._char(op, value), end
            return state
        if op is _constants.BRANCH:
            state = self._state()
            self._free[state] = [self._sequence(branch, end) for branch in value[1]]
            return state
        if op is _constants.SUBPATTERN:
            _, on, off, items = value
            if on or off:
                raise ValueError("has flags of a group, which are not supported in stop patterns; put them in front")
            return self._sequence(items, end)
        if op in _REPEATS:
            least, most, repeated = value
            return self._repeat(least, most, repeated, end)
        raise ValueError(f"has {op!s:.40}, which is not supported in stop patterns")

    def _repeat(self, least: int, most: Any, items: Any, end: int) -> int:
        if most is _constants.MAXREPEAT:
            loop = self._state()
            self._free[loop] = [self._sequence(items, loop), end]
            end = loop
        else:
            last = end
            for _ in range(most - least):
                state = self._state()
                self._free[state] = [self._sequence(items, end), last]
                end = state
        for _ in range(least):
            end = self._sequence(items, end)
        return end

    def _char(self, op: Any, value: Any) -> re.Pattern[str]:
        one = _parser.SubPattern(self._parsed.state, [(op, value)])
        compiled: re.Pattern[str] = _compiler.compile(one, self._parsed.state.flags)
        return compiled

    def _closure(self, states: Iterable[int]) -> States:
        found, waiting = set[int](), list(states)
        while waiting:
            state = waiting.pop()
            if state not in found:
                found.add(state)
                waiting += self._free[state]
        return frozenset(found)


@lru_cache(64)
def compiled(pattern: str, field: str) -> StopRegex:
    """Raises InputError: names the field, and what is wrong with the pattern."""
    try:
        return StopRegex(pattern)
    except ValueError as error:
        raise InputError.at(field, f"{pattern!r:.80} {error}") from None


class RegexMatcher:
    """Finds where a match of one of several patterns ends first in a streamed text; the first pattern wins."""

    __slots__ = ("_patterns", "_states", "matched")

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._patterns = [compiled(pattern, "stop_regex") for pattern in patterns]
        self._states = [pattern.start for pattern in self._patterns]
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """The piece, up to the end of the first match."""
        for place, char in enumerate(piece):
            for number, pattern in enumerate(self._patterns):
                states = self._states[number] = pattern.after(self._states[number], char)
                if pattern.end in states:
                    self.matched = pattern.pattern
                    return piece[: place + 1]
        return piece
