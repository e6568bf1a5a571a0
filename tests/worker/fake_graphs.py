"""Fake CUDA graphs without a GPU: a replay runs the captured call again, with the same static tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_engine.kernels.attention.protocol import AttentionCapabilities
from moe_engine.kernels.attention.queries import AttentionBatch


class Replay:
    """Implements `step_graphs.CapturedGraph`."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.count = 0

    def replay(self) -> None:
        self.count += 1
        self._run()


class FakeGraphs:
    """Implements `step_graphs.GraphBackend`."""

    def __init__(self) -> None:
        self.recordings: list[Replay] = []

    def capture(self, run: Callable[[], None]) -> Replay:
        self.recordings.append(Replay(run))
        return self.recordings[-1]

    @property
    def num_replays(self) -> int:
        return sum(recording.count for recording in self.recordings)


class NothingToRenew:
    """The plan of a backend without planning."""

    def __init__(self, batch: AttentionBatch, log: list[tuple[list[int], list[int]]]) -> None:
        assert batch.decode is not None
        self._queries, self._log = batch.decode, log

    def renew(self) -> None:
        """Records the context lengths of host and device."""
        self._log.append((list(self._queries.context_lens), self._queries.context_lens_device.tolist()))


class ReplayableTorch:
    """The torch row of attention with `plan_in_place`: its plans are empty, and its layers read the queries."""

    def __init__(self, backend: Any) -> None:
        self.name = backend.name
        self.plan = backend.plan
        self.renewed: list[tuple[list[int], list[int]]] = []
        self.capabilities = AttentionCapabilities(self.plan_in_place)

    def plan_in_place(self, batch: AttentionBatch) -> NothingToRenew:
        return NothingToRenew(batch, self.renewed)
