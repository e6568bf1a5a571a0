"""Operator control of one rank's expert recording and EPLB. All calls run on the worker's thread, between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_engine.parallel.recording.recorder import ExpertRecorder
from moe_engine.worker.eplb.eplb_manager import EPLBManager
from moe_engine.worker.eplb.expert_recording_model import ExpertRecordingModel


class ExpertControl:
    """Results are plain values for msgpack. No method is collective: ranks may be called at any step.

    Args:
        recorder: None without recording (no --expert-distribution-recorder-mode, no experts).
        balance: None without EPLB.
        observed: the model wrapper that reports passes to the recorder.
        observe: installs wrapper and recorder in the model (True), or removes them: without recording, a step has no
            overhead.
    """

    def __init__(
        self,
        recorder: ExpertRecorder | None = None,
        balance: EPLBManager | None = None,
        observed: ExpertRecordingModel | None = None,
        observe: Callable[[bool], None] | None = None,
    ) -> None:
        self.recorder = recorder
        self.balance = balance
        self.observed = observed
        self._observe = observe
        self._observing = False
        self._update_observing()

    def start(self) -> bool:
        """Records from the next pass on; False without a recorder."""
        if self.recorder is not None:
            self.recorder.start()
            self._update_observing()
        return self.recorder is not None

    def stop(self) -> bool:
        if self.recorder is not None:
            self.recorder.stop()
            self._update_observing()
        return self.recorder is not None

    def _update_observing(self) -> None:
        watching = self.observed is not None and self.observed.is_watching
        if watching != self._observing and self._observe is not None:
            self._observing = watching
            self._observe(watching)

    def dump_part(self) -> dict[str, Any] | None:
        """This rank's part of a dump, for `merge.write_parts`; None without a recorder."""
        return None if self.recorder is None else self.recorder.dump_part()

    def snapshot(self) -> dict[str, Any] | None:
        """This rank's part of the live view, for `joined_replies.sum_snapshots`."""
        return None if self.recorder is None else self.recorder.snapshot()

    def state(self) -> dict[str, Any]:
        """For metrics: ``balancedness`` as `BalanceWindows.values` (if reported), ``eplb`` as `BalanceStats`; may be
        read from any thread."""
        state: dict[str, Any] = {}
        if self.recorder is not None and (balancedness := self.recorder.balance.values()):
            state["balancedness"] = balancedness
        if self.balance is not None:
            state["eplb"] = self.balance.stats.to_dict()
        return state

    def close(self) -> None:
        if self.balance is not None:
            self.balance.close()
