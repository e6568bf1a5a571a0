"""CPU time that frontend and client take for requests, for the results of steps and for tokens.

On a machine of few cores frontend and client are one queue: only one of them computes while steps run. The CPU time is
the work that the queue has to do, whatever else delays it.

Both processes wake up for the results of each step, however few tokens it has. Without a variable of its own this work
would count as that of requests: answers among few others have many steps for their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """Requests, steps with results for them, chunks with tokens that were sent to them, CPU seconds."""

    requests: int
    steps: int
    chunks: int
    seconds: float


class Work(NamedTuple):
    """CPU seconds of a request, of the results of a step, and of each chunk in it."""

    request: float = 0.0
    step: float = 0.0
    chunk: float = 0.0


def work_of(samples: Sequence[Sample]) -> Work:
    """The work with the least squares of relative errors, so that short samples of requests alone count as much as long
    ones of tokens. No kind of work is below 0."""
    taken = np.array([sample.seconds for sample in samples])
    counts = np.array([sample[:3] for sample in samples], float) / taken[:, None]
    columns = list(range(counts.shape[1]))
    while True:
        found = np.linalg.lstsq(counts[:, columns], np.ones(len(samples)), rcond=None)[0]
        if min(found) >= 0:
            break
        del columns[int(found.argmin())]
    seconds = dict(zip(columns, map(float, found)))
    return Work(*(seconds.get(column, 0.0) for column in range(counts.shape[1])))
