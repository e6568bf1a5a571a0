"""Expected KV of the admitted sessions over their next turns.

Each turn adds tokens to a session, and after each turn a share of the sessions ends. Sessions that were admitted
together are short at first and grow together: more of them fit now than later. The expectation counts, for each
session, the observed share of sessions of its length that returned.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe_engine.scheduler.step_sums import MEMORY

MAX_TURNS = 64
"""Lengths of sessions that are distinguished, in turns of mean growth; also the turns that are looked ahead, at
most."""
STEPS = 64


def rounded(share: float) -> float:
    """In steps, so that `ReturnTimes` computes few tables of values."""
    return round(share * STEPS) / STEPS


class ReturnShares:
    """How many sessions returned, and how many ended, by their length in turns of mean growth.

    `doubted`: sessions that have been silent for so long that they have ended with some probability; its sum.
    """

    def __init__(self) -> None:
        self._returned, self._ended = [0.0] * MAX_TURNS, [0.0] * MAX_TURNS
        self.doubted = [0.0] * MAX_TURNS

    def observe(self, turns: int, returned: bool) -> None:
        keep = 1 - MEMORY
        self._returned = [count * keep for count in self._returned]
        self._ended = [count * keep for count in self._ended]
        (self._returned if returned else self._ended)[turns] += 1

    def found(self, turns: int) -> None:
        """A session has returned that counted as ended."""
        self._ended[turns] = max(self._ended[turns] - 1, 0.0)

    def shares(self) -> list[float]:
        """By length: share of sessions that return, in steps of 1 / `STEPS`. A length with few observations has the
        share of all."""
        returned = sum(self._returned)
        mean = returned / (returned + sum(self._ended) + sum(self.doubted) + 1)
        seen = zip(self._returned, self._ended, self.doubted)
        return [rounded((back + mean) / (back + ended + doubted + 1)) for back, ended, doubted in seen]

    def demands(self, growth: float) -> tuple[list[float], list[float]]:
        """By length of a session that has another turn: its expected turns from that one on, and the tokens by which it
        exceeds its length, summed over them."""
        shares, turns, tokens = self.shares(), [1.0] * MAX_TURNS, [growth] * MAX_TURNS
        for turn in range(MAX_TURNS - 2, -1, -1):
            share = shares[turn + 1]
            turns[turn] = 1 + share * turns[turn + 1]
            tokens[turn] = growth * turns[turn] + share * tokens[turn + 1]
        return turns, tokens


class Projection:
    """
    Args:
        growth: tokens that a turn adds.
        shares: as of `ReturnShares`.
        num_turns: turns that are looked ahead.
    """

    def __init__(self, growth: float, shares: list[float], num_turns: int) -> None:
        self._growth, self._shares = growth, shares
        self._tokens = [0.0] * (max(1, min(num_turns, MAX_TURNS)) + 1)
        """Expected tokens of all sessions after each turn of theirs, beyond the tokens that they have now."""

    def add_all(self, sessions: Iterable[tuple[int, float, float, float]]) -> None:
        """Adds sessions.

        Args:
            sessions: length in turns of mean growth, tokens now, tokens at the end of the current turn, and the
                probability that another turn follows.
        """
        growth, shares, tokens = self._growth, self._shares, self._tokens
        counts, sums, now = [0.0] * MAX_TURNS, [0.0] * MAX_TURNS, 0.0
        for turn, has, end, returns in sessions:
            now += has
            tokens[0] += end - has
            following = min(turn + 1, MAX_TURNS - 1)
            counts[following] += returns
            sums[following] += returns * (end + growth)
        for n in range(1, len(tokens)):
            tokens[n] += sum(sums) - now
            counts, sums = (
                _next([count * share for count, share in zip(counts, shares)]),
                _next([(size + growth * count) * share for count, size, share in zip(counts, sums, shares)]),
            )

    def add_arrivals(self, per_turn: float, turn: int, size: float) -> None:
        """Adds sessions that begin later: `per_turn` in each turn from the next on. `turn`, `size`: as of `add`, at the
        end of their first turn."""
        together, alive = 0.0, per_turn
        for n in range(1, len(self._tokens)):
            together += alive * (size + (n - 1) * self._growth)
            self._tokens[n] += together
            alive *= self._shares[min(turn + n - 1, MAX_TURNS - 1)]

    def num_turns(self, turn: int) -> float:
        """Expected turns of a session whose first turn ends with that length."""
        turns, alive = 0.0, 1.0
        for later in range(MAX_TURNS):
            turns += alive
            alive *= self._shares[min(turn + later, MAX_TURNS - 1)]
        return turns

    def add(self, turn: int, size: float) -> None:
        """Adds a session with `size` tokens at the end of its current turn: `turn` turns of mean growth."""
        self._tokens = self._with(turn, size)

    def growth_of(self, turn: int, size: float) -> float:
        """The largest expected number of tokens of one session, beyond those at the end of its current turn."""
        most, alive = size, 1.0
        for n in range(1, len(self._tokens)):
            alive *= self._shares[min(turn + n - 1, MAX_TURNS - 1)]
            most = max(most, alive * (size + n * self._growth))
        return most - size

    def _with(self, turn: int, size: float) -> list[float]:
        tokens, alive = list(self._tokens), 1.0
        for n in range(1, len(tokens)):
            alive *= self._shares[min(turn + n - 1, MAX_TURNS - 1)]
            tokens[n] += alive * (size + n * self._growth) - size
        return tokens

    @property
    def peak(self) -> float:
        """The largest expected number of tokens, beyond those that the sessions have now."""
        return max(0.0, *self._tokens)

    def peak_with(self, turn: int, size: float) -> float:
        """The peak if a session is added, beyond the tokens of all and the tokens of its current turn."""
        return max(0.0, *self._with(turn, size))


def _next(values: list[float]) -> list[float]:
    """Values of the next turn; the last place has all later ones."""
    return [0.0, *values[:-2], values[-2] + values[-1]]
