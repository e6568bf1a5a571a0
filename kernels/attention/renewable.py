"""Plans of captured launches: they stay at fixed addresses and are renewed for the lengths of each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from moe_engine.kernels.queries import AttentionBatch


class RenewablePlan(Protocol):
    """A plan at fixed addresses, so that captured launches (a CUDA graph) can run with the plan of another step."""

    @property
    def on_device(self) -> bool:
        """Launches read the lengths on the device: `renew` needs upper bounds in `context_lens`."""

    @property
    def common(self) -> bool:
        """The values that `renew` writes serve all plans of the backend for the same number of requests. False: the
        plan serves its own queries and others of the same number of requests with the same number of tokens each."""

    def renew(self) -> None:
        """Replans for the queries' current `context_lens`, in stream order; no host wait."""


InPlacePlanner = Callable[[AttentionBatch], RenewablePlan | None]
