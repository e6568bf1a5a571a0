"""Settings of a running scheduler: the values in force, with their bounds. The scheduler is their one owner; endpoints
and controllers change them through `RunSettings.set`.

Memory, tables and graphs are sized at the launch, so a setting never exceeds the sizes of the launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_engine.errors import InputError
from moe_engine.scheduler.config import SchedulerConfig

LEAST_TIMEOUT = 0.001
"""Seconds."""
MOST_PREFILLS = 32
"""Largest value of `max_consecutive_prefills`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    Attributes:
        at_launch: the value of the launch.
        bounds: least and largest value.
        kind: int or float.
        has_off: None means no limit.
        choices: the values of a setting of kind str.
    """

    at_launch: Callable[[SchedulerConfig], Any]
    bounds: Callable[[SchedulerConfig], tuple[float, float]]
    kind: type[int] | type[float] | type[str] = int
    has_off: bool = False
    choices: Callable[[SchedulerConfig], tuple[str, ...]] = lambda config: ()


def _chunk_bounds(config: SchedulerConfig) -> tuple[float, float]:
    return config.page_size, config.chunk_tokens or math.inf


def _no_bounds(config: SchedulerConfig) -> tuple[float, float]:
    return 0, math.inf


def _policies(config: SchedulerConfig) -> tuple[str, ...]:
    """The policies that differ only in the order of a batch; other policies sort the queue itself."""
    both = ("fcfs", "lpm")
    return both if config.effective_policy in both and not config.disable_radix_cache else (config.policy,)


SETTINGS: dict[str, Setting] = {
    "schedule_conservativeness": Setting(lambda c: c.schedule_conservativeness, lambda c: (0, math.inf), float),
    "max_running_requests": Setting(lambda c: c.max_rows, lambda c: (1, c.max_rows)),
    "chunked_prefill_size": Setting(lambda c: c.chunked_prefill_size, _chunk_bounds),
    "max_prefill_tokens": Setting(lambda c: c.max_prefill_tokens, lambda c: (c.page_size, c.max_prefill_tokens)),
    "prefill_max_requests": Setting(
        lambda c: c.prefill_max_requests, lambda c: (1, c.prefill_max_requests or math.inf)
    ),
    "max_consecutive_prefills": Setting(lambda c: c.max_consecutive_prefills, lambda c: (1, MOST_PREFILLS)),
    "max_delayed_tokens": Setting(lambda c: c.max_delayed_tokens, lambda c: (1, math.inf), has_off=True),
    "schedule_policy": Setting(lambda c: c.policy, _no_bounds, str, choices=_policies),
    "max_queued_requests": Setting(lambda c: c.max_queued_requests, lambda c: (1, math.inf), has_off=True),
    "request_waiting_timeout": Setting(
        lambda c: c.request_waiting_timeout, lambda c: (LEAST_TIMEOUT, math.inf), float, has_off=True
    ),
    "request_running_timeout": Setting(
        lambda c: c.request_running_timeout, lambda c: (LEAST_TIMEOUT, math.inf), float, has_off=True
    ),
}
"""Settings by flag, with the values of one scheduler."""


class RunSettings:
    """Attributes: config: of the launch. on_change: called after each change."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.on_change: list[Callable[[], None]] = []
        self._values = {name: setting.at_launch(config) for name, setting in SETTINGS.items()}

    @property
    def schedule_conservativeness(self) -> float:
        return float(self._values["schedule_conservativeness"])

    @property
    def max_running_requests(self) -> int:
        return int(self._values["max_running_requests"])

    @property
    def max_prefill_tokens(self) -> int:
        return int(self._values["max_prefill_tokens"])

    @property
    def max_consecutive_prefills(self) -> int:
        return int(self._values["max_consecutive_prefills"])

    @property
    def schedule_policy(self) -> str:
        return str(self._values["schedule_policy"])

    @property
    def policies(self) -> tuple[str, ...]:
        """Values that `schedule_policy` may have."""
        return _policies(self.config)

    @property
    def prefill_max_requests(self) -> int | None:
        return self._values["prefill_max_requests"]

    @property
    def max_queued_requests(self) -> int | None:
        return self._values["max_queued_requests"]

    @property
    def request_waiting_timeout(self) -> float | None:
        return self._values["request_waiting_timeout"]

    @property
    def request_running_timeout(self) -> float | None:
        return self._values["request_running_timeout"]

    @property
    def chunk_tokens(self) -> int | None:
        """As `SchedulerConfig.chunk_tokens`, with the size in force."""
        size, limit = int(self._values["chunked_prefill_size"]), self.config.max_step_tokens
        if size <= 0:
            return limit
        return size if limit is None else min(size, limit)

    def chunk_beside(self, num_waiting: int) -> int | None:
        """`chunk_tokens` of a step for which this number of decoding requests waits."""
        most, delayed = self.chunk_tokens, self._values["max_delayed_tokens"]
        if delayed is None or not num_waiting:
            return most
        config = self.config
        tokens = max(config.floor_page(delayed // num_waiting), config.ceil_page(config.least_chunk))
        return tokens if most is None else min(tokens, most)

    def values(self) -> dict[str, Any]:
        """The values in force."""
        return dict(self._values)

    def bounds(self) -> dict[str, list[Any]]:
        """Least and largest value, None: no largest one; or the choices."""
        found: dict[str, list[Any]] = {}
        for name, setting in SETTINGS.items():
            low, high = setting.bounds(self.config)
            limits = [low, None if math.isinf(high) else high]
            found[name] = list(setting.choices(self.config)) if setting.kind is str else limits
        return found

    def set(self, changes: Mapping[str, Any], *, check_only: bool = False) -> dict[str, Any]:
        """Changes all of these settings, or none. They apply from the next plan on. Returns the values in force.

        Raises:
            InputError: names the setting that cannot have the value, and its bounds.
        """
        checked = {name: self._checked(name, value) for name, value in changes.items()}
        if not check_only and checked:
            self._values |= checked
            for tell in self.on_change:
                tell()
        return self.values()

    def _checked(self, name: str, value: Any) -> Any:
        setting = SETTINGS.get(name)
        if setting is None:
            known = ", ".join(SETTINGS)
            raise InputError(
                f"server_args.{name:.80}: cannot change at run time; these can: {known}", field="server_args"
            )
        if value == setting.at_launch(self.config) and type(value) is type(setting.at_launch(self.config)):
            return value  # also -1, which means no chunks
        if value is None and setting.has_off:
            return None
        if setting.kind is str:
            choices = setting.choices(self.config)
            if value not in choices:
                words = f"server_args.{name}: expected one of {', '.join(choices)}, got {value!r:.40}"
                raise InputError(words, field="server_args")
            return value
        low, high = setting.bounds(self.config)
        right = isinstance(value, int if setting.kind is int else (int, float)) and not isinstance(value, bool)
        if not right or not low <= value <= high or math.isinf(value):
            kind = "an integer" if setting.kind is int else "a number"
            upper = f" and at most {high:g}, the limit of this launch" if not math.isinf(high) else ""
            off = ", or null" if setting.has_off else ""
            words = f"server_args.{name}: expected {kind} of at least {low:g}{upper}{off}, got {value!r:.40}"
            raise InputError(words, field="server_args")
        return setting.kind(value)
