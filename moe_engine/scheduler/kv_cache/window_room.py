"""Free space in the window pool, for admission and retraction. Counts are in tokens of whole pages.

The KV of a request in windowed layers grows to a limit: its window, and the pages that a step in flight may still read.
A request below the limit is expected to reach it with its outputs; a request at the limit needs no more.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.kv_cache.window_pages import WindowPages
from moe_engine.types import Request
from moe_engine.types.row_sizes import window_request_pages


class WindowRoom:
    """Counts of one window pool."""

    def __init__(self, config: SchedulerConfig, windows: WindowPages) -> None:
        self._windows = windows
        self._page = config.page_size
        speculation = config.speculation
        draft_slots = speculation.num_slots(speculation.num_steps) if speculation is not None else 0
        self.limit = window_request_pages(config.window, config.page_size, draft_slots) * config.page_size
        """Max tokens of a request in the window pool, without those of its prompt in a step."""

    @property
    def available(self) -> int:
        """Tokens that are free, become free with the steps in flight, or can be evicted."""
        return self._windows.num_unpinned * self._page

    @property
    def available_now(self) -> int:
        """Tokens that are free or can be evicted; only if no step is in flight."""
        return self._windows.num_free_or_idle * self._page

    def pinned_pages(self, request: Request) -> list[int]:
        """The request's pages that its next step reads or writes."""
        return request.slots[request.window_start * self._page :: self._page]

    def growth(self, request: Request, tokens: int) -> int:
        """Pool tokens that the next `tokens` tokens of the request add."""
        held = len(self.pinned_pages(request)) * self._page
        return max(0, min(tokens, self.limit - held))

    def expected(self, ratio: float, growths: Iterable[tuple[Request, int]]) -> float:
        """Pool tokens that running requests are expected to add, if this share of each growth is generated."""
        return ratio * sum(self.growth(request, tokens) for request, tokens in growths)

    def of_new(self, tokens: int) -> int:
        """Pool tokens of a new request with `tokens` tokens without KV, its expected outputs included."""
        return min(tokens, self.limit)

    def gain(self, request: Request) -> int:
        """Pool tokens freed by releasing the request: pages that no other request reads."""
        return self._windows.num_pinned_once(self.pinned_pages(request)) * self._page
