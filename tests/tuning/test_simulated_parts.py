"""A load simulated in parts (`--processes`) against the same load in one process."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_engine.cli import simulate_checks
from moe_engine.cli.main import main
from moe_engine.cli.simulate import own_parser
from moe_engine.cli.simulate_parts import Division
from moe_engine.tuning import serving_report
from moe_engine.tuning.simulator import parts
from moe_engine.tuning.simulator.faults import Fault
from moe_engine.tuning.simulator.fleet import Fleet, FleetSpec, Outcome
from moe_engine.tuning.simulator.parts import PartRun, Reply, Seams, merged, requests_from
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from moe_engine.tuning.simulator.workload import Arrival, Fixed, Numbers
from tests.models.published import V3
from tests.tuning.plan_models import write
from tests.tuning.test_simulator import Linear, config
from tests.tuning.test_simulator_input import costs


@pytest.fixture(autouse=True)
def short_loads(monkeypatch):
    """Loads of some thousand requests, whose times differ more."""
    monkeypatch.setattr(parts, "COMPARED", 8)
    monkeypatch.setattr(simulate_checks, "LEAST_PART", 1024)


def load(rng: random.Random, count: int, rate: float, most_new: int = 60, shared: int = 0) -> Fixed:
    now, numbers, arrivals = 0.0, Numbers(1 << 40), []
    head = list(range(shared))
    for _ in range(count):
        now += rng.expovariate(rate)
        first = numbers.take(100)
        prompt = [*head, *range(first, first + rng.randint(1, 100))]
        arrivals.append(Arrival(now, prompt, rng.randint(1, most_new)))
    return Fixed(arrivals, count)


def in_parts(spec: FleetSpec, make_load, size: int, firsts: list[int], interval: float = 0.0) -> tuple[Outcome, Seams]:
    """As the processes, one after the other: the later parts first, whose windows the earlier ones need."""
    seams, results = Seams(firsts), {}
    for part in reversed(range(len(firsts))):
        begins: deque[tuple[int, float]] = deque()
        fleet, alone = Fleet(spec, requests_from(make_load(), size, firsts[part], begins)), []
        fleet.recorder.keeps_details = True

        def complete(number, tally, older, part=part, alone=alone):
            if alone:
                return False
            seams.completed(part, number, tally, older)
            if not seams.is_shared(part, number):
                return False
            ((waiting, reply),) = seams.replies()
            assert waiting == part
            alone += [reply] * (reply is Reply.ALONE)
            return reply is Reply.END

        later = firsts[part + 1] if part + 1 < len(firsts) else None
        results[part] = PartRun(fleet, begins, later, complete).run(lambda count: None, interval)
        seams.ended(part)
    used = seams.used()
    return merged([results[part] for part in range(len(used))], used), seams


def in_one(spec: FleetSpec, workload: Fixed, interval: float = 0.0) -> Outcome:
    fleet = Fleet(spec, workload)
    fleet.recorder.keeps_details = True
    return fleet.run(interval=interval)


def rows(outcome: Outcome) -> list[tuple[float, float, float, int, bool]]:
    answers = outcome.recorder.answers
    return sorted((a.started, a.ttft, a.latency, a.cached_tokens, a.success) for a in answers)


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    """Equal but for the order of sums of seconds."""
    assert rows(ours) == rows(theirs)
    names = ("num_steps", "retractions", "prompt_tokens", "cached_tokens", "accept_length", "faults", "missed")
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.busy_seconds == pytest.approx(theirs.busy_seconds)
    assert ours.samples == theirs.samples and ours.recorder.steps == theirs.recorder.steps
    assert ours.recorder.ended_at == pytest.approx(theirs.recorder.ended_at, rel=1e-12)
    assert sorted(ours.recorder.refused) == sorted(theirs.recorder.refused)
    gaps = [outcome.recorder.gaps.distribution("x") for outcome in (ours, theirs)]
    assert (
        gaps[0] == pytest.approx(gaps[1], rel=1e-6, abs=1e-5)
        and ours.recorder.gaps.peak_tokens == theirs.recorder.gaps.peak_tokens
    )


def test_parts_between_idle_times_equal_one_process():
    """Each request ends before the next one: an engine that begins anywhere computes the same."""
    rng = random.Random(random.getrandbits(32))
    prompts = [[number + 1] * rng.randint(1, 90) for number in range(90)]
    arrivals = [Arrival(float(2 * number), prompt, rng.randint(1, 9)) for number, prompt in enumerate(prompts)]

    def make_load():
        return Fixed([replace(arrival) for arrival in arrivals], len(arrivals))

    spec = FleetSpec(ReplicaSpec(config(), Linear(), num_groups=2), num_replicas=2)
    ours, seams = in_parts(spec, make_load, 5, [0, 6, 12], interval=1.0)
    assert seams.alone == 2 and seams.used() == [0, 8, 14]  # two windows agree
    assert_same(ours, in_one(spec, make_load(), interval=1.0))
    assert [seam["requests_twice"] for seam in seams.report] == [10, 10]


def test_a_steady_load(monkeypatch):
    """Every request counts once, every token has its gap, and the figures are those of one process."""
    monkeypatch.setattr(parts, "COMPARED", 300)
    monkeypatch.setattr(parts, "TTFT", 0.1)
    monkeypatch.setattr(parts, "LATENCY", 0.05)
    seed, count = random.getrandbits(32), 1500
    spec = FleetSpec(ReplicaSpec(config(), Linear(), num_groups=4))
    one = in_one(spec, load(random.Random(seed), count, 60.0))
    ours, seams = in_parts(spec, lambda: load(random.Random(seed), count, 60.0), 50, [0, 12])
    assert seams.report and seams.used()[1] < 30
    assert [row[0] for row in rows(ours)] == [row[0] for row in rows(one)]
    assert [a.output_len for a in sorted(ours.recorder.answers, key=lambda a: a.started)] == [
        a.output_len for a in sorted(one.recorder.answers, key=lambda a: a.started)
    ]
    figures = [
        serving_report.figures(o.recorder.answers, o.recorder.ended_at, gaps=o.recorder.gaps) for o in (ours, one)
    ]
    for name, bound in (("mean_ttft_ms", 0.1), ("mean_e2e_latency_ms", 0.05), ("mean_itl_ms", 0.05)):
        assert figures[0][name] == pytest.approx(figures[1][name], rel=bound), name
    assert ours.num_steps == pytest.approx(one.num_steps, rel=0.01)
    # requests in the engine at the seam are about as far in both
    assert ours.recorder.gaps.num_gaps == pytest.approx(one.recorder.gaps.num_gaps, abs=400)


@pytest.mark.parametrize("kind", ["overload", "old prefixes", "restart"])
def test_parts_that_never_agree_equal_one_process(kind: str):
    """A queue that grows; a prefix that came once, long ago; a restart whose queue does not end."""
    seed = random.getrandbits(32)
    replica = ReplicaSpec(config(max_rows=4, num_slots=4096 * 4, session_hold=0.0), Linear())
    spec, count, rate = FleetSpec(replica), 600, 30.0
    if kind == "restart":
        spec = FleetSpec(replace(replica, num_groups=2), faults=(Fault(0, 1.0, 2),), restart_seconds=500.0)

    def make_load():
        rng = random.Random(seed)
        if kind != "old prefixes":
            return load(rng, count, rate)
        firsts = [number << 24 for number in range(1, 9)]
        arrivals = [Arrival(2.0 * n, list(range(firsts[n % 8], firsts[n % 8] + 200 + n)), 2) for n in range(8)]
        for number in range(8, 400):  # each prefix again, once, in the second part
            new = 1 << 40 | number << 12
            again = number in range(200, 208)
            prompt = list(range(firsts[number % 8], firsts[number % 8] + 190)) if again else list(range(new, new + 9))
            arrivals.append(Arrival(2.0 * number, prompt, 2))
        return Fixed(arrivals, len(arrivals))

    size, firsts = (4, [0, 50]) if kind == "old prefixes" else (25, [0, 12])
    ours, seams = in_parts(spec, make_load, size, firsts, interval=2.0)
    if kind == "old prefixes":  # the parts agree behind the requests whose prefix the later one does not have
        assert seams.used()[1] >= 54 and not seams.report[0]["cached_tokens"]
    else:
        assert seams.alone == 0 and seams.used() == [0] and not seams.report
    assert_same(ours, in_one(spec, make_load(), interval=2.0))


def test_requests_that_arrive_at_once_are_in_one_window():
    rng = random.Random(random.getrandbits(32))
    moments = sorted(rng.choice([1.0, 2.0, 3.5, 4.0, rng.uniform(0, 5)]) for _ in range(200))
    arrivals = [Arrival(moment, [1], 1) for moment in moments]
    begins: deque[tuple[int, float]] = deque()
    assert [a.seconds for a in requests_from(Fixed(arrivals, 200), 16, 0, begins).first()] == moments
    numbers = [number for number, _ in begins]
    assert numbers == sorted(set(numbers)) and begins[0] == (0, moments[0])
    for number, seconds in begins:
        assert moments.index(seconds) // 16 == number or moments.index(seconds) > number * 16
    for first in (2, 5):
        some: deque[tuple[int, float]] = deque()
        drawn = [a.seconds for a in requests_from(Fixed(arrivals, 200), 16, first, some).first()]
        assert list(some) == [begin for begin in begins if begin[0] >= first]
        assert drawn == moments[len(moments) - len(drawn) :] and drawn[0] == some[0][1]


FLAGS = ["--request-rate", "5", "--random-input-len", "40", "--random-output-len", "8", "--random-range-ratio", "0.5"]
FLAGS += ["--disable-radix-cache"]  # prompts of a small vocabulary have first tokens in common, more with time


def test_the_command_in_two_processes(tmp_path, capsys):
    path, out, log = tmp_path / "costs.json", tmp_path / "out.json", tmp_path / "server.log"
    path.write_text(costs().to_json())
    flags = ["simulate", "--cost-file", str(path), "--num-prompts", "2100", *FLAGS, "--output-file", str(out)]
    found = []
    for processes in ("1", "2"):
        more = ["--log-file", str(log), "--output-details", "--plot", str(tmp_path / "load.png")]
        assert main([*flags, *more, "--processes", processes]) == 0
        found.append((json.loads(out.read_text()), log.read_text().splitlines(), capsys.readouterr().out))
    (one, lines, _), (two, lines_of_two, shown) = found
    assert len(two["seams"]) == 1 and "process 2: warm-up of" in shown
    assert two["input_lens"] == one["input_lens"] and two["output_lens"] == one["output_lens"]
    for name in ("completed", "total_output_tokens", "total_input_tokens"):
        assert two[name] == one[name]
    for name in ("mean_ttft_ms", "mean_e2e_latency_ms"):
        assert two[name] == pytest.approx(one[name], rel=0.02), name
    assert len(two["step_times"]) == two["steps"]
    times = [re.match(r"\[([0-9: -]+)", line) for line in lines_of_two]
    moments = [time[1] for time in times if time]
    assert len(moments) > 100 and moments == sorted(moments)
    starts = [[line for line in text if "READY" in line] for text in (lines, lines_of_two)]
    assert len(starts[0]) == len(starts[1])
    assert sorted(os.listdir(tmp_path)) == ["costs.json", "load.png", "out.json", "server.log"]


def test_the_default_is_the_cores_for_large_parts_of_an_open_load(monkeypatch):
    cores, tokens = random.randint(2, 9), random.randint(1000, 9000)
    monkeypatch.setattr(simulate_checks, "usable_cores", lambda: cores)
    config = SimpleNamespace(
        scheduling=SimpleNamespace(autopilot=False),
        args=SimpleNamespace(experts=SimpleNamespace(enable_eplb=False)),
    )

    def chosen(count: int, *flags: str, free: float = 1e15, pool: int = tokens) -> int:
        own = own_parser().parse_args(["--hardware", "H200", "--request-rate", "5", *flags])
        monkeypatch.setattr(simulate_checks, "host_memory", lambda: SimpleNamespace(available_bytes=int(free)))
        return simulate_checks.num_processes(own, config, pool, Fixed([], count))

    large = simulate_checks.LARGE_PART
    assert chosen(large * 20) == cores and chosen(2 * large - 1) == 1 and chosen(2 * large) == 2
    assert chosen(large * 20, "--processes", "1") == 1 and chosen(large, "--processes", "2") == 2
    for closed in (["--max-concurrency", "9"], ["--dataset-name", "agentic"], ["--request-rate", "inf"]):
        assert chosen(large * 20, *closed) == 1
    needed = 2 * simulate_checks.TOKEN_BYTES * tokens
    assert chosen(large * 20, free=2.5 * needed) == 2 and chosen(large * 20, free=needed / 2) == 1
    short = ["--random-input-len", "1", "--random-output-len", "1"]  # fewer tokens than the pool
    assert chosen(large * 2, *short, free=1e9, pool=1 << 60) == 2


@pytest.mark.parametrize("how", ["error", "signal"])
def test_a_process_that_fails_is_named(tmp_path, capsys, monkeypatch, how):
    path, run = tmp_path / "costs.json", Fleet.run
    path.write_text(costs().to_json())

    def broken(fleet, *args, **kwargs):
        if fleet._arrivals[0][0] == 0.0:
            return run(fleet, *args, **kwargs)
        if how == "error":
            raise RuntimeError("out of luck")
        os.kill(os.getpid(), 9)

    monkeypatch.setattr(Fleet, "run", broken)
    assert main(["simulate", "--cost-file", str(path), "--num-prompts", "2100", *FLAGS, "--processes", "2"]) == 1
    message = capsys.readouterr().err
    assert Division.of(2100, 2) == Division(256, [0, 3]) and "process 2 of 2 (from request 768 on)" in message
    assert ("out of luck" if how == "error" else "signal 9; each process has caches of its own") in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--processes", "0"], "--processes is 0; it must be at least 1"),
        (["--processes", "2", "--request-rate", "5"], "1000 requests are too few, it takes 2048"),
        (["--processes", "2"], "all requests arrive together"),
        (["--processes", "2", "--request-rate", "5", "--max-concurrency", "9"], "requests wait for answers"),
        (["--processes", "2", "--dataset-name", "agentic", "--request-rate", "5"], "requests wait for answers"),
        (["--processes", "2", "--dataset-name", "trace", "--dataset-path", "TRACE"], "requests wait for answers"),
        (["--processes", "2", "--request-rate", "5", "--autopilot"], "--autopilot changes limits"),
    ],
)
def test_loads_that_have_no_parts_are_refused(tmp_path, capsys, flags, words):
    path, trace = tmp_path / "costs.json", tmp_path / "trace.jsonl"
    path.write_text(costs().to_json())
    lines = [{"timestamp": 1000 * i, "input_length": 600, "output_length": 3, "session_id": "a"} for i in range(3)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    given = [str(trace) if flag == "TRACE" else flag for flag in flags]
    assert main(["simulate", "--cost-file", str(path), *given]) == 2
    message = capsys.readouterr().err
    assert words in message and "--processes" in message and "Traceback" not in message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_a_command_that_was_killed(number, tmp_path):
    """A part drew the lengths of all requests before its own, for minutes without a parent."""
    words = ["--hardware", "8xH200", "--tp", "8", "--num-prompts", "1000000", "--processes", "2", "--request-rate", "9"]
    command = [
        sys.executable,
        "-m",
        "moe_engine.cli.main",
        "simulate",
        "--model-path",
        write(tmp_path / "m", V3),
        *words,
    ]
    started = subprocess.Popen([*command, "--dataset-name", "random"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        file, end = Path(f"/proc/{started.pid}/task/{started.pid}/children"), time.monotonic() + 120
        while len(parts_ := file.read_text().split()) < 2 and time.monotonic() < end:
            assert started.poll() is None, started.stdout.read()
            time.sleep(0.1)
    finally:
        started.send_signal(number)
        started.wait(60)
    assert len(parts_) == 2
    end = time.monotonic() + 30
    while alive := [part for part in parts_ if _runs(part)]:
        assert time.monotonic() < end, alive
        time.sleep(0.1)


def _runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
