"""Logs whose lines are not of one time zone, or of a clock that is set back."""

from __future__ import annotations

import random
import time

import pytest

from moe_engine.tuning.doctor.clocks import ZONE_STEP, LogClock
from tests.tuning import logs

ZONES = [hours * 3600.0 for hours in (-10, -7, 0, 1, 5.5, 5.75, 9, 14)]


def relabeled(line: str, second: float, zone: float) -> str:
    """The line with the local time of a zone in the place of UTC."""
    return line.replace(_text(second), _text(second + zone))


def _text(second: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(logs.BEGAN + second))


def load(num_ranks: int) -> list[tuple[float, int, str]]:
    """20 minutes of decodes with a full queue, and retractions in the second half: (second, rank, line)."""
    found = []
    for second in range(0, 1200, 5):
        for rank in random.sample(range(num_ranks), num_ranks):
            found.append((second, rank, logs.decode(second, rank=f"DP{rank} TP{rank}")))
        if second > 600:
            found.append((second, 0, logs.retraction(second)))
    return found


@pytest.mark.parametrize("window", [0.0, 300.0])
def test_ranks_of_several_zones(window):
    """The findings, windows and rates of a log are those of the log with all times in UTC."""
    lines = load(3)
    zones = random.sample(ZONES, 3)
    utc = logs.read([line for *_, line in lines], window).diagnosis
    local = logs.read([relabeled(line, second, zones[rank]) for second, rank, line in lines], window).diagnosis
    expected, found = utc.findings(), local.findings()
    assert [(each.name, each.windows) for each in found] == [(each.name, each.windows) for each in expected]
    assert "retractions" in [each.name for each in expected]
    assert local.num_windows == utc.num_windows


def test_a_clock_that_is_set_back_in_autumn():
    def findings(set_back: float) -> tuple[int, list[str]]:
        lines = [relabeled(line, second, -set_back * (second >= 555)) for second, _, line in load(2)]
        found = logs.read(lines, 300.0).diagnosis
        return found.num_windows, [each.name for each in found.findings()]

    assert findings(3600) == findings(0)


def test_other_steps_stay():
    clock, began = LogClock(), float(logs.BEGAN)
    idle = 8 * 3600.0 + random.uniform(60, 800)
    assert [clock(began), clock(began + idle), clock(began + idle + 1)] == [began, began + idle, began + idle + 1]
    earlier = began + idle + 1 - random.randint(4, 20) * ZONE_STEP - random.uniform(60, 800)
    assert clock(earlier) == earlier, "a second log after the first"
    assert clock(earlier - 30) == earlier - 30, "lines of several processes are out of order by seconds"
