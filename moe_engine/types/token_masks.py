"""Token masks of a step, packed, and the handle of a step that is launched before its masks are known.

The mask of a position often depends on the token before it, which the host gets with the previous step's result. A
plan with `StepPlan.masked` rows is therefore launched first (`StepWorker.launch`: drafts and forward) and sampled by a
second call (`StepWorker.sample`). Standard library only.

Legend: P masked positions of a step, V vocabulary.
"""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moe_engine.errors import StepNotRun
from moe_engine.types.step import StepResult


def words_of(vocab_size: int) -> int:
    """32-bit words of one packed mask."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step, of all `StepPlan.masked` rows in order.

    Row rows[i] has counts[i] positions: its sampled token, or each node of its draft tree, the root first. 0: the
    request has ended, and its sampled token will be dropped. `bits` holds the masks [P, ceil(V / 32)] uint32, little
    endian: bit t % 32 of word t // 32 is set if token t is allowed.
    """

    number: int
    rows: list[int]
    counts: list[int]
    bits: bytes


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The draft tree of a row, on the host: token of each node, the root first, -1 for no draft; parent of each node,
    None for a chain."""

    tokens: list[int]
    parents: list[int] | None = None

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]


class LaunchedStep:
    """A step whose sampling waits for its masks.

    `result`: of the whole step. `drafts`: draft trees of the masked rows by row, known before the forward; empty in a
    step without speculation, and on ranks that do not report them. `masks`: set by `StepWorker.sample`. `prepared`: the
    form in which the worker applies them, set before `masks` by the thread that brings them.
    """

    def __init__(self, number: int, *, reports_drafts: bool = True) -> None:
        self.number = number
        self.reports_drafts = reports_drafts
        self.result: Future[StepResult] = Future()
        self.drafts: Future[dict[int, DraftTree]] = Future()
        self.masks: Future[StepMasks] = Future()
        self.prepared: Any = None

    def follow(self, result: Future[StepResult]) -> None:
        """Forwards a result, or its error."""
        result.add_done_callback(self._ended)

    def report(self, drafts: dict[int, DraftTree]) -> None:
        with suppress(InvalidStateError):  # reported already
            self.drafts.set_result(drafts)

    def sample(self, masks: StepMasks) -> None:
        with suppress(InvalidStateError):  # abandoned
            self.masks.set_result(masks)

    def abandon(self) -> None:
        """Fails the step, which will get no masks, instead of letting it wait."""
        with suppress(InvalidStateError):  # sampled already
            self.masks.set_exception(StepNotRun(f"step {self.number} was launched and will not be sampled"))
        self.report({})

    def _ended(self, result: Future[StepResult]) -> None:
        error = result.exception()
        self.report({})
        if error is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(result.result())
