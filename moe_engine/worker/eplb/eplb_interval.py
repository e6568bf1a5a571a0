"""EPLB interval: forward passes between two rebalances; with `--autopilot` it follows the gain of rebalances.

A rebalance is judged on the passes after it, which its plan did not use: the balancedness of its placement against that
of the previous placement, on the same counts.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("moe_engine")

LITTLE = 0.02
"""Gain of balancedness below which rebalances are made half as often."""
MUCH = 0.05
"""Gain, and loss since, above which rebalances are made twice as often."""
RANGE = 8
"""The interval is at most this factor times the flag's value, and at least the flag's value divided by it."""
LEAST_PASSES = 16
VERDICTS = 2
"""Consecutive rebalances above that limit before the interval is shortened."""


class EPLBInterval:
    """Kept on the planning rank, which broadcasts it.

    Args:
        passes: value of the flag (``--eplb-rebalance-num-iterations``).
        adaptive: whether it changes.
    """

    def __init__(self, passes: int, adaptive: bool) -> None:
        self.passes = passes
        self._adaptive = adaptive
        self._least = min(max(passes // RANGE, LEAST_PASSES), passes)
        self._most = passes * RANGE
        self._verdicts = 0

    def after_rebalance(self, gained: float, lost: float) -> None:
        """Adjusts the interval after the last rebalance was judged.

        Args:
            gained: balancedness of its placement minus that of the previous placement, on the passes after it.
            lost: planned balancedness minus the balancedness on those passes.
        """
        if not self._adaptive:
            return
        self._verdicts = self._verdicts + 1 if gained > MUCH and lost > MUCH else 0
        passes = self.passes
        if gained < LITTLE:
            passes = min(2 * passes, self._most)
        elif self._verdicts == VERDICTS:
            self._verdicts = 0
            passes = max(passes // 2, self._least)
        if passes != self.passes:
            logger.info(
                "Autopilot: EPLB interval %d -> %d passes: the last rebalance gained %.3f of balancedness on the "
                "passes behind it, which have %.3f less than planned.",
                self.passes,
                passes,
                gained,
                lost,
            )
            self.passes = passes
