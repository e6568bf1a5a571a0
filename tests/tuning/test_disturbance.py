"""Other programs beside a measurement: their share is found, their rounds are repeated and do not count."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from moe_engine.tuning import under_load
from moe_engine.tuning.calibration import MORE_ROUNDS, ROUNDS, Probes
from moe_engine.tuning.disturbance import Disturbance, Watch, conditions_of, named
from moe_engine.tuning.measured_points import Limits
from moe_engine.tuning.rounds import Rounds

QUIET, BUSY = Disturbance(0.01, 0.0, {}), Disturbance(0.3, 0.02, {"cc1plus": 0.2})
BURN = "import time\ninput()\nwhile time.process_time() < 0.35: pass\nprint(flush=True)\ninput()"


@pytest.mark.parametrize("is_own", [False, True])
def test_the_work_of_another_program_is_found_by_name(is_own: bool) -> None:
    own: list[psutil.Process] = []
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        own += [process] * is_own
        watch = Watch(lambda: own)
        before, key = watch._begin, (child.pid, process.create_time())
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        now, found = watch._counts(), watch.end()
        child.communicate(b"\n")
    beside = now.all_cores - now.own - (before.all_cores - before.own)
    if is_own:
        assert key not in now.by_process and now.own - before.own > 0.25
    else:
        assert now.by_process[key][1] - before.by_process[key][1] > 0.25
        assert beside > 0.25 and found.others > 0 and found.steal >= 0


def test_a_python_program_is_named_by_its_module() -> None:
    run = ["/usr/bin/python3", "-u", "-m", "pytest", "-q"]
    assert named({"name": "python3", "cmdline": run}) == "python3 -m pytest"
    assert named({"name": "python3", "cmdline": ["python3", "-m"]}) == "python3"
    assert named({"name": "cc1plus", "cmdline": ["cc1plus", "-m", "x"]}) == named({"name": "cc1plus", "cmdline": None})


def fake_probes(monkeypatch: pytest.MonkeyPatch, found: list[Disturbance]) -> tuple[Probes, list[str]]:
    """Probes without a server, whose rounds are beside other programs as given."""

    async def nothing(*_: object, **__: object) -> None:
        return None

    monkeypatch.setattr(Probes, "_round", nothing)
    monkeypatch.setattr(Probes, "_ask", nothing)
    monkeypatch.setattr(under_load, "cost_file", lambda points, parts: None)
    left = iter(found)
    watch = SimpleNamespace(begin=lambda: None, end=lambda: next(left))
    said: list[str] = []
    probes = Probes("", Limits(8, 100, 1000, 100, range(9)), lambda: 0.0, watch)  # type: ignore[arg-type]
    asyncio.run(probes.run(said.append))
    return probes, said


def test_rounds_beside_other_programs_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = set(random.sample(range(ROUNDS), random.randint(0, min(MORE_ROUNDS, ROUNDS - 1))))
    number = ROUNDS + len(disturbed)
    found = [BUSY if place in disturbed else QUIET for place in range(number)]
    probes, said = fake_probes(monkeypatch, found)
    assert probes.disturbances == found and probes._points.rounds.left_out == disturbed
    assert len(said) == len(disturbed) and all("32% of the cores' time (cc1plus 20%" in line for line in said)
    assert conditions_of(found, 0.01, [1.0] * number)["disturbed"] == ""


def test_a_machine_that_stays_busy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    probes, _ = fake_probes(monkeypatch, [BUSY] * ROUNDS)  # more rounds would be no better
    words = conditions_of(probes.disturbances, 0.5, [1.0] * ROUNDS)["disturbed"]
    assert "cc1plus 20%" in words and f"{ROUNDS} of {ROUNDS} rounds" in words
    fake_probes(monkeypatch, [BUSY, QUIET, *[BUSY] * (ROUNDS + MORE_ROUNDS - 2)])
    assert "differ by 50%" in conditions_of([QUIET] * ROUNDS, 0.5, [1.0] * ROUNDS)["disturbed"]


def test_values_of_rounds_that_are_left_out() -> None:
    """Two of six rounds were beside another program, at half the speed and with values of their own."""
    rounds, truth = Rounds(), {number: random.uniform(0.001, 0.1) for number in range(8)}
    busy = set(random.sample(range(6), 2))
    for number in range(6):
        rounds.begin()
        for point, seconds in truth.items():
            rounds.add(point, seconds * (2 * random.uniform(0.5, 2) if number in busy else random.gauss(1, 0.01)))
        if number in busy:
            rounds.add("once", 0.5)
    rounds.left_out = busy
    for point, seconds in truth.items():
        assert rounds.value(point) == pytest.approx(seconds, rel=0.05)
    assert rounds.spread < 0.1 and rounds.value("once") > 0
    assert sorted(rounds.kept(enumerate("abcdef"))) == [name for i, name in enumerate("abcdef") if i not in busy]
    assert rounds.kept((number, number) for number in busy) == list(busy)
