"""CPU time that frontend and client take for requests and for tokens, by measurements with several numbers of both.

On a machine of few cores frontend and client are one queue: only one of them computes beside the steps. The CPU time is
the work that the queue has to do, whatever else delays it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Sample = tuple[int, int, float]
"""Requests, chunks with tokens that were sent to them, CPU seconds."""


def work_of(samples: Sequence[Sample]) -> tuple[float, float]:
    """CPU seconds of a request and of a chunk; each request counts alike, whatever its sample. Neither is below 0."""
    counts = np.array([(1.0, sent / requests) for requests, sent, _ in samples])
    taken = np.array([seconds / requests for requests, _, seconds in samples])
    root = np.sqrt([requests for requests, *_ in samples])
    request, chunk = np.linalg.lstsq(counts * root[:, None], taken * root, rcond=None)[0]
    if request >= 0 and chunk >= 0:
        return float(request), float(chunk)
    place = 1 if request < 0 else 0  # all work is that of the other kind
    one = sum(taken * root**2) / sum(counts[:, place] * root**2)
    return (0.0, float(one)) if place else (float(one), 0.0)
