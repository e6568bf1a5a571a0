"""Expected share of max_new_tokens that a running request generates: SGLang's new_token_ratio."""

from __future__ import annotations

from collections.abc import Sequence

from moe_engine.scheduler.run_settings import RunSettings
from moe_engine.types import Request


class NewTokenRatio:
    """Starts high, decays with each decode step without retraction, and jumps up after a retraction."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings, config = settings, settings.config
        self._steps = config.new_token_ratio_decay_steps
        self._retract_steps = config.retract_decode_steps
        self.value = self._began_at = self.lowest = 0.0
        self._decay: float = 0.0
        self._from = 0.0
        self._num_decays = 0
        self.reset()
        settings.on_change.append(self._rescale)

    @property
    def initial(self) -> float:
        return min(self._settings.config.init_new_token_ratio * self._settings.schedule_conservativeness, 1.0)

    def _rescale(self) -> None:
        """Resets the ratio if the conservativeness has changed."""
        if self.initial != self._began_at:
            self.reset()

    def decay(self, steps: int = 1) -> None:
        """Lowers the ratio after decode steps without retraction."""
        self._num_decays += steps
        if self._from > self.lowest:
            self.value = max(self._from - self._num_decays * self._decay, self.lowest)

    def after_retraction(self, remaining: Sequence[Request]) -> None:
        """Sets the ratio from the outputs of the remaining requests, plus some steps of margin.

        It then decays within the usual number of steps, whatever its value.
        """
        produced = sum(len(r.output_ids) for r in remaining)
        allowed = sum(r.max_new_tokens for r in remaining)
        self.value = min(1.0, (produced + self._retract_steps * len(remaining)) / (allowed + 1))
        self._decay = max(self._decay, (self.value - self.lowest) / self._steps)
        self._begin_decay()

    def reset(self) -> None:
        """Restores the initial ratio, when idle."""
        self.value = self._began_at = self.initial
        self.lowest = min(self.value * self._settings.config.min_new_token_ratio_factor, 1.0)
        self._decay = (self.value - self.lowest) / self._steps
        self._begin_decay()

    def _begin_decay(self) -> None:
        self._from, self._num_decays = self.value, 0
