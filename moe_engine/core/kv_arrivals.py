"""KV events outside the steps, reported by the workers' threads to the core: loads completed after their step's result,
and progress of the storage on each rank of the group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from moe_engine.errors import MoeEngineError
from moe_engine.types import KVReport


class KVArrivals:
    """
    Args:
        wake: ends the wait of an idle core; called from any thread.
        num_ranks: ranks that report on the storage.
        poll: fetches the reports of ranks in other processes, (rank, report).
    """

    def __init__(
        self, wake: Callable[[], None], num_ranks: int = 1, poll: Callable[[], Iterable[tuple[int, KVReport]]] = tuple
    ) -> None:
        self._wake = wake
        self._num_ranks, self._poll = num_ranks, poll
        self._reports: deque[tuple[int, BaseException | None]] = deque()
        self._own: deque[KVReport] = deque()
        self._by_op: dict[int, dict[int, KVReport]] = {}
        """Last report of each rank about an operation."""

    def report(self, load: int, error: BaseException | None) -> None:
        """Reports a load as complete or failed; load 0: a store has failed. Thread-safe."""
        self._reports.append((load, error))
        self._wake()

    def report_storage(self, report: KVReport) -> None:
        """Reports storage progress of this rank. Thread-safe."""
        self._own.append(report)
        self._wake()

    @property
    def polls(self) -> bool:
        """Whether an idle core must poll, because reports of other processes do not wake it."""
        return self._num_ranks > 1

    def take(self) -> list[int]:
        """The loads reported since the last call.

        Raises:
            MoeEngineError: a load failed, so its request would wait forever; or a store, whose KV counts as stored.
        """
        loads = []
        while self._reports:
            load, error = self._reports.popleft()
            if error is not None:
                what = f"load {load}" if load else "a store"
                raise MoeEngineError(f"{what} of KV failed: {type(error).__name__}: {error}") from error
            loads.append(load)
        return loads

    def take_storage(self) -> list[KVReport]:
        """The minimum of all ranks' reports, for operations reported since the last call."""
        changed = [self._add(-1, self._own.popleft()) for _ in range(len(self._own))]
        if self._num_ranks > 1:
            changed += [self._add(rank, report) for rank, report in self._poll()]
        out = []
        for number in dict.fromkeys(changed):
            reports = self._by_op[number]
            if len(reports) < self._num_ranks:
                continue
            ended = all(report.ended for report in reports.values())
            out.append(KVReport(number, min(report.num_pages for report in reports.values()), ended))
            if ended:
                del self._by_op[number]
        return out

    def _add(self, rank: int, report: KVReport) -> int:
        self._by_op.setdefault(report.id, {})[rank] = report
        return report.id
