"""Late masks: allowed tokens that depend on the tokens before, computed by the core while the step's forward runs.

Step N+1 is launched while step N runs. With the result of step N the state of each masked request advances, its masks
are computed, along its draft tree if it has one, and `StepWorker.sample` completes step N+1. Steps without such
requests are executed in one call.

Legend: W 32-bit words of a mask.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from moe_engine.core.executor import StepWorker
from moe_engine.errors import MoeEngineError
from moe_engine.scheduler.jump_forward import MIN_TOKENS, JumpForward
from moe_engine.structured_output.mask_batch import FilledAtOnce, MaskBatch
from moe_engine.types import Request, Status, StepPlan, StepResult
from moe_engine.types.token_masks import DraftTree, LaunchedStep, StepMasks, words_of

logger = logging.getLogger("moe_engine")

ALL = np.uint32(0xFFFFFFFF)
NOTHING_ALLOWED = (
    "no token of the vocabulary is allowed at this position: the vocabulary cannot continue the text; change the "
    "constraint"
)


class PositionMasks(Protocol):
    """The state of one request, which determines the tokens allowed next."""

    def accept(self, token: int) -> None:
        """The sequence continues with this token, which the last mask allowed."""

    def fill(self, mask: np.ndarray) -> None:
        """Clears the bits of forbidden tokens in mask [W] uint32, which has the bits of all tokens set."""

    def fill_later(self, batch: MaskBatch, place: int) -> None:
        """As `fill`, for row `place` of the batch, whose bits are all set; may defer the work to `batch.run`."""

    def check(self) -> None:
        """Raises the error of a mask that `batch.run` should have filled."""

    def rollback(self, count: int) -> None:
        """Takes back the last `count` accepted tokens."""

    # Optional: `forced() -> list[int]`, tokens of the next positions whose masks allow one token each.


class AllMasks(FilledAtOnce):
    """`PositionMasks` of several sources: a token is allowed if all of them allow it."""

    def __init__(self, sources: Sequence[PositionMasks]) -> None:
        self._sources = sources

    def accept(self, token: int) -> None:
        for source in self._sources:
            source.accept(token)

    def fill(self, mask: np.ndarray) -> None:
        for source in self._sources:
            source.fill(mask)

    def rollback(self, count: int) -> None:
        for source in self._sources:
            source.rollback(count)


class MaskState:
    """A request's `PositionMasks`, and how many of its outputs they have accepted."""

    def __init__(self, masks: PositionMasks) -> None:
        self._masks = masks
        # a test of a runtime-checkable protocol would take longer than a mask
        self._forced: Callable[[], list[int]] | None = getattr(masks, "forced", None)
        self._num_seen = 0

    def advance(self, outputs: list[int], forced: list[int]) -> None:
        """Accepts the outputs that are new, and the forced tokens that follow them."""
        end = len(outputs) + len(forced)
        if self._num_seen > end:  # a step with forced tokens failed
            self._masks.rollback(self._num_seen - end)
            self._num_seen = end
        for token in outputs[self._num_seen :]:
            self._masks.accept(token)
        for token in forced[max(0, self._num_seen - len(outputs)) :]:
            self._masks.accept(token)
        self._num_seen = end

    def forced(self) -> list[int]:
        """Tokens that must follow: the masks allow no others."""
        return [] if self._forced is None else self._forced()

    def fill_later(self, batch: MaskBatch, place: int) -> None:
        """The mask of the next position in row `place`; complete after `batch.run`, unless `check` raises."""
        self._masks.fill_later(batch, place)

    def check(self) -> None:
        self._masks.check()

    def along(self, tree: DraftTree, found: np.ndarray) -> None:
        """Fills the masks [N, W] after drafts; that of the root is there. After a forbidden draft a mask stays full:
        that draft is never accepted. A mask that raises becomes empty: the request fails if its position is reached."""
        path = [0]  # nodes whose tokens are accepted, below the root
        reached = {0}
        for node in _depth_first(tree):
            token, parent = tree.tokens[node], tree.parent(node)
            if parent not in reached or token < 0 or not found[parent][token >> 5] >> np.uint32(token & 31) & 1:
                continue
            back = len(path) - 1 - path.index(parent)
            if back:
                self._masks.rollback(back)
                del path[-back:]
            self._masks.accept(token)
            path.append(node)
            try:
                self._masks.fill(found[node])
                reached.add(node)
            except Exception:
                logger.warning("A mask behind a draft failed", exc_info=True)
                found[node][:] = 0
        if len(path) > 1:
            self._masks.rollback(len(path) - 1)


class LateMasks:
    """The masked requests of one core, and the step launched without its masks.

    Args:
        fail: ends a request whose masks raised or allow nothing: (rid, message, HTTP status).
        jumps: gets forced tokens.
    """

    def __init__(
        self, worker: StepWorker, vocab_size: int | None, fail: Callable[[str, str, int], None], jumps: JumpForward
    ) -> None:
        self._worker = worker
        self._jumps = jumps
        size = vocab_size or 0
        self._all = np.full(words_of(size), ALL)
        if size % 32:
            self._all[-1] = ALL >> np.uint32(32 - size % 32)  # bits after the vocabulary are no tokens
        self._fail = fail
        self.states: dict[Request, MaskState] = {}
        """By request; ended ones are removed before the next masked step."""
        self._launched: tuple[StepPlan, LaunchedStep, list[Request]] | None = None

    def add(self, request: Request, *masks: PositionMasks) -> None:
        self.states[request] = MaskState(masks[0] if len(masks) == 1 else AllMasks(masks))

    def rows_of(self, sampled: list[Request]) -> list[int]:
        """Rows of a step's sampled requests that need masks (`StepPlan.masked`)."""
        for request in [some for some in self.states if some.status is Status.FINISHED]:
            del self.states[request]
        return [request.row for request in sampled if request in self.states]

    def launch(self, plan: StepPlan, sampled: list[Request]) -> Future[StepResult]:
        """Launches a step with masked rows."""
        launched = self._worker.launch(plan)
        self._launched = plan, launched, [request for request in sampled if request in self.states]
        return launched.result

    def send(self) -> None:
        """Samples the launched step; the results of all earlier steps are applied."""
        assert self._launched is not None
        (plan, launched, requests), self._launched = self._launched, None
        drafts: dict[int, DraftTree] = {}
        if plan.speculation is not None:
            drafts = launched.drafts.result()
        forced = self._jumps.planned(plan.number)
        counts = [
            self._positions(request, drafts.get(row), forced.get(request, []))
            for row, request in zip(plan.masked, requests)
        ]
        tables = np.empty((sum(counts), len(self._all)), dtype=np.uint32)
        tables[:] = self._all
        batch, spans, begin = MaskBatch(tables), list[tuple[Request, DraftTree | None, int, int]](), 0
        for row, request, count in zip(plan.masked, requests, counts):
            if count and self._try(request, self.states[request].fill_later, batch, begin):
                spans.append((request, drafts.get(row), begin, begin + count))
            begin += count
        batch.run()
        tables &= self._all
        any_allowed: np.ndarray = np.asarray(tables.any(axis=1))
        for request, tree, begin, end in spans:
            if not self._try(request, self._complete, request, bool(any_allowed[begin]), tree, tables[begin:end]):
                tables[begin:end] = self._all  # the request has ended: its sampled token will be dropped
        self._worker.sample(StepMasks(plan.number, plan.masked, counts, tables.astype("<u4", copy=False).tobytes()))
        if self._jumps.enabled:  # after the masks, for which the worker may wait
            self._report_forced(tables, [(request, begin) for request, _, begin, _ in spans], forced)

    def _report_forced(
        self, tables: np.ndarray, places: list[tuple[Request, int]], behind: Mapping[Request, list[int]]
    ) -> None:
        """Reports the forced tokens of requests whose masks, in these rows of tables [P, W], allow one token.

        Args:
            behind: forced tokens of this step, which the masks follow.
        """
        places = [(request, place) for request, place in places if _may_jump(request)]
        if not places:
            return
        largest = tables.max(axis=1)  # the one word that is not 0, where there is one; it has one bit
        single = ((tables != 0).sum(axis=1) == 1) & (largest & (largest - np.uint32(1)) == 0)
        for request, place in places:
            if single[place]:
                position = request.num_tokens + len(behind.get(request, []))
                self._jumps.report(request, position, self.states[request].forced())

    def _positions(self, request: Request, tree: DraftTree | None, forced: list[int]) -> int:
        """Masks that a launched request needs, after its state has advanced; 0 if it has ended."""
        if request.status is not Status.RUNNING or request.to_abort is not None:
            return 0
        if not self._try(request, self.states[request].advance, request.output_ids, forced):
            return 0
        return 1 if tree is None else len(tree.tokens)

    def _complete(self, request: Request, any_allowed: bool, tree: DraftTree | None, found: np.ndarray) -> None:
        """Checks the mask of the next position, and fills those [N, W] after drafts."""
        state = self.states[request]
        state.check()
        if not any_allowed:
            raise MoeEngineError(NOTHING_ALLOWED)
        if tree is not None:
            state.along(tree, found)

    def _try(self, request: Request, work: Callable[..., None], *args: Any) -> bool:
        """False if it raised; the request has failed then."""
        try:
            work(*args)
        except MoeEngineError as error:
            self._fail(request.rid, f"{_source(request)}: {error}", 400)
        except Exception as error:
            logger.exception("Masks of request %s failed", request.rid)
            message = f"the masks of the request failed: {type(error).__name__}: {error}"
            self._fail(request.rid, message, 500)
        else:
            return True
        return False

    def abandon(self) -> None:
        """The launched step, if any, will not be sampled."""
        if self._launched is not None:
            self._worker.abandon()
            self._launched = None


def _may_jump(request: Request) -> bool:
    """Whether the request has room for a run of forced tokens, a position needs its token only (no log-probabilities or
    the like), and no client code may choose another token."""
    return (
        request.status is Status.RUNNING
        and request.max_new_tokens - len(request.output_ids) > MIN_TOKENS  # the sampled one, and a run after it
        and request.logprobs is None
        and request.positions is None
        and request.sampling.custom_logit_processor is None
    )


def _source(request: Request) -> str:
    """The client's field that forbids tokens."""
    constraint = request.sampling.constraint
    return "bad_words" if constraint is None else constraint.where


def _depth_first(tree: DraftTree) -> list[int]:
    """The nodes below the root, each after its parent, subtree by subtree."""
    children: dict[int, list[int]] = {}
    for node in range(1, len(tree.tokens)):
        children.setdefault(tree.parent(node), []).append(node)
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += reversed(children.get(node, []))
    return order[1:]
