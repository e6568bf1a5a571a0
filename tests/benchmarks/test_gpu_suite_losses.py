"""The GPU suite when a GPU is lost: what its parts keep, skip and report. `tests/simulated_cuda/test_on_device.py`
runs it on simulated devices."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_suite import cases, ranks_here
from benchmarks.gpu_suite.attempts import DEVICE_LOST, MOST_LOSSES, Attempts, DeviceLost
from benchmarks.gpu_suite.parts import PARTS, run_apart
from benchmarks.gpu_suite.setting import Setting
from benchmarks.gpu_suite.texts import summary


def test_a_process_that_died_at_a_line_goes_on_behind_it(tmp_path):
    setting = Setting.of("cpu", 60, tmp_path / "part.json")
    first, second, *_ = cases.tiny_cases()
    rows = {"a": None, "b": None}

    def values(lines: list[dict[str, Any]]) -> dict[str, Any]:
        return {"lines": lines, "count": len(lines)}

    attempts = Attempts(setting, values)
    attempts.run(first, "a", lambda: {"us": 1.0})
    with pytest.raises(ZeroDivisionError):  # stands for the end of the process
        attempts.run(first, "b", lambda: {"us": 1 / 0})
    again = Attempts(setting, values)
    assert [line["failed"] for line in again.lines if "failed" in line] == ["the process ended during this line"]
    assert again.rows(first, rows) == {} and set(again.rows(second, rows)) == {"a", "b"}
    again.run(second, "a", lambda: {"us": 2.0})
    assert setting.saved()["count"] == 2 and setting.saved()["at"]["kernel"] == second.name


def test_a_row_that_loses_the_device_again_and_again_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(Setting, "device_works", lambda self: False)
    setting = Setting.of("cpu", 60, tmp_path / "part.json")
    of_model = [case for case in cases.tiny_cases() if case.name.startswith("tiny.")]
    for case in of_model[:MOST_LOSSES]:
        attempts = Attempts(setting, lambda lines: {"lines": lines})
        with pytest.raises(DeviceLost):
            attempts.run(case, "a", lambda: {"failed": "lost"})
    left = Attempts(setting, lambda lines: {"lines": lines})
    other = next(case for case in cases.tiny_cases() if not case.name.startswith("tiny."))
    third = of_model[MOST_LOSSES]
    assert set(left.rows(third, {"a": None, "b": None})) == {"b"} and set(left.rows(other, {"a": None})) == {"a"}


def test_what_a_part_has_when_its_time_is_over_is_kept(monkeypatch):
    from benchmarks.gpu_suite import parts

    codes = [DEVICE_LOST, -11, None]

    def once(part, seconds, setting, log, on_values):
        log.write_text("")
        setting.save({"lines": [{"us": 1.0}] * (3 - len(codes)), "at": {"kernel": "k", "row": "r"}})
        return codes.pop(0)

    monkeypatch.setattr(parts, "_run_once", once)
    values = run_apart(PARTS[0], 60, "cpu")
    assert values["restarts"] == 2 and len(values["lines"]) == 2
    assert values["failed"].startswith("not done after 60 s, at k with r")


def test_a_line_that_hangs_is_ended_and_the_part_goes_on_behind_it(monkeypatch):
    from benchmarks.gpu_suite import parts

    processes = []

    def start_process(arguments, errors):
        """The first process hangs at a line; the next one finds its reason."""
        output = Path(arguments[arguments.index("--output") + 1])
        setting = Setting.of("cpu", 60, output)
        attempts = Attempts(setting, lambda lines: {"lines": lines})
        if not processes:
            setting.save({"lines": [], "at": {"kernel": "tree.k", "family": "mla", "row": "triton"}})
        else:
            setting.save({"lines": attempts.lines})
        command = ["sleep", "60"] if not processes else ["true"]
        processes.append(subprocess.Popen(command, start_new_session=True))
        return processes[-1]

    monkeypatch.setattr(parts, "start_process", start_process)
    monkeypatch.setattr(parts, "SHOWN_S", 0.2)
    shown: list[dict[str, Any]] = []
    values = run_apart(replace(PARTS[1], line_s=1.5), 60, "cpu", on_values=shown.append)
    assert shown[0]["failed"] == "not finished" and shown[0]["lines"] == []  # what an interrupted run leaves
    assert values["restarts"] == 1 and "failed" not in values and processes[0].returncode == -9
    (line,) = values["lines"]
    assert line["failed"] == "no result after 2 s" and line["lost"] and not line["ok"]


def test_summary_names_what_was_missed_and_what_failed():
    targets = [
        {"name": n, "wanted": 1.0, "reached": r, "met": r == 2.0} for n, r in (("a", 2.0), ("b", 0.5), ("c", None))
    ]
    result = {
        "kernels": {"targets": targets, "lines": [{"kernel": "k", "row": "triton", "failed": "x\nBroken: y"}]},
        "decode": {"failed": "Traceback\nRuntimeError: no memory\n"},
        "parity": {"wrong": 7, "left_out": ["x"], "lines": [
            *({"kernel": f"k{i}", "row": "triton", "failed": "same", "ok": False} for i in range(6)),
            {"kernel": "a", "row": "triton", "error": 0.5, "bound": 1e-2, "ok": False},
        ]},
    }  # fmt: skip
    text = summary(result)
    assert text.endswith("targets: 1 met, 1 missed, 1 not measured\n  missed: b: 0.50 of 1.00")
    assert "kernels: k with triton: Broken: y" in text and "part parity: 7 wrong, 7 lines" in text
    assert "k0 with triton, k1 with triton, k2 with triton, k3 with triton and 2 more: same" in text
    assert "parity: a with triton: error 5.0e-01, at most 1e-02" in text and "parity: no time left for 1" in text
    assert "part decode failed: RuntimeError: no memory" in text


def test_ranks_on_one_gpu_wait_beside_the_programs_that_they_wait_for():
    """Two programs of the waiting kernels fit on each of 132 multiprocessors, as the ahead-of-time table shows: eight
    warps of at most 128 registers a thread."""
    load, sms = ranks_here.V3_BESIDE, 132
    waiting = load.num_ranks * min(sms, load.regions.capacity)
    sending = load.num_ranks * max(load.tokens, load.regions.capacity)
    assert waiting + sending <= 2 * sms
