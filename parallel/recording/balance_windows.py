"""Balancedness of each pass and its mean over the last 10, 100 and 1000.

Legend: L layers, P physical experts, G ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from torch import Tensor

WINDOWS = (10, 100, 1000)
EPSILON = 1e-5
"""Keeps a layer without tokens at 1, as in SGLang."""


class BalanceWindows:
    """Balancedness windows, updated with the counts of all ranks after each pass."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._places = list(range(num_ranks))
        self._last: deque[float] = deque(maxlen=max(WINDOWS))  # newest first
        self._pass_id = -1
        self._tokens = 0

    def go_on(self, alive: Sequence[bool]) -> None:
        """Restricts later passes to the live ranks."""
        self._places = [rank for rank, lives in enumerate(alive) if lives]

    def add(self, pass_id: int, physical: Tensor) -> float:
        """Counts int [L, P] summed over all ranks -> the pass's balancedness, mean over layers of mean / max rank."""
        by_rank = physical.view(physical.shape[0], self._num_ranks, -1).sum(dim=2).double()  # [L, G]
        by_rank = by_rank[:, self._places]
        balancedness = float(((by_rank.mean(dim=1) + EPSILON) / (by_rank.amax(dim=1) + EPSILON)).mean())
        self._last.appendleft(balancedness)
        self._pass_id, self._tokens = pass_id, int(by_rank.sum())
        return balancedness

    def mean(self, window: int = max(WINDOWS)) -> float | None:
        """Mean over the last `window` passes, or fewer if there are fewer; None before the first."""
        last = list(islice(self._last, window))
        return sum(last) / len(last) if last else None

    def values(self) -> dict[str, float]:
        """``current``, ``10``, ``100``, ``1000``; empty before the first pass."""
        if not self._last:
            return {}
        return {"current": self._last[0], **{str(window): self.mean(window) or 0.0 for window in WINDOWS}}

    def log_line(self) -> str:
        """The line SGLang logs after a pass."""
        averages = " ".join(f"last_{window}_average_balancedness={self.mean(window):.03f}" for window in WINDOWS)
        return (
            f"[Expert Balancedness] forward_pass_id={self._pass_id} current_pass_balancedness={self._last[0]:.03f} "
            f"{averages} gpu_physical_count_sum={self._tokens}"
        )

    def reset(self) -> None:
        self._last.clear()
