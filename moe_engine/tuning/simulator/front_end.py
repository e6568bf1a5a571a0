"""The frontend of a simulated server: one thread that reads requests and sends tokens.

On a machine that computes a step in a millisecond it is as busy as the engine: requests wait in front of the
scheduler, and first tokens wait behind the tokens of other requests. As in the server, the results of a step are sent
before the next request is read (`moe_engine.server.start_queue`).
"""

from __future__ import annotations

import math
from collections import deque

from moe_engine.tuning.simulator.workload import Arrival


class FrontEnd:
    """A queue with a single server. The results of a step are a batch, which passes all requests except the one in
    service.

    Args:
        request_seconds: work of a request, before its scheduler receives it.
        token_seconds: work of the tokens that a request gets in a step.
        results_seconds: work of the results of a step, in addition to that of its tokens.
    """

    def __init__(self, request_seconds: float, token_seconds: float, results_seconds: float = 0.0) -> None:
        self._request, self._token, self._results = request_seconds, token_seconds, results_seconds
        self._waiting: deque[tuple[float, Arrival]] = deque()
        """With the moment from which on it can be read."""
        self._free = 0.0
        """End of the work that has begun, and of the newest batch."""
        self._in_service = math.inf
        """End of the work of the first waiting request; infinite before it begins."""
        self._batch_at = self._batch_begins = 0.0
        self._before = 0.0
        """`_free` without the newest batch, which may come later than a request that is added after it: replicas
        advance by whole steps."""

    def add(self, arrival: Arrival, wait: float = 0.0) -> None:
        """A request arrives. Arrivals are added in order of time. `wait`: seconds without a core."""
        self._waiting.append((arrival.seconds + wait, arrival))

    @property
    def next_read(self) -> float:
        """The moment at which the scheduler receives the first waiting request, unless a batch comes before it."""
        if not self._waiting or self._in_service < math.inf:
            return self._in_service
        begin = max(self._before, self._waiting[0][0])
        return (begin if begin < self._batch_at else max(self._free, begin)) + self._request

    def read(self) -> Arrival:
        """The first waiting request, at `next_read`."""
        end = self.next_read
        if self._in_service < math.inf:
            self._in_service = math.inf
        elif end - self._request < self._batch_at:  # before the newest batch, which begins later
            self._before = end
            begins = max(end, self._batch_begins)
            self._free += begins - self._batch_begins
            self._batch_begins = begins
        else:
            self._free = end
        return self._waiting.popleft()[1]

    def tokens(self, moment: float, count: int) -> None:
        """Results of a step, or a part of them: the requests with tokens."""
        if moment > self._batch_at:
            end = self.next_read
            if end - self._request < moment and self._in_service == math.inf:
                self._in_service = self._free = max(end, self._free)
            self._before, self._batch_at = self._free, moment
            self._batch_begins = max(self._free, moment)
            self._free = self._batch_begins + self._results
        self._free += count * self._token

    def delay(self, moment: float, rows: int) -> float:
        """Seconds from the results of a step with `rows` requests until a token of it is sent, on average. Call after
        `tokens`."""
        return max(self._batch_begins - moment, 0.0) + self._results + (rows + 1) / 2 * self._token
