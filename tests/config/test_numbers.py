"""Numbers of flags have the digits 0 to 9: those of other scripts, which Python reads too, are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from moe_engine.cli.main import main
from moe_engine.config.numbers import READERS
from tests.models.published import V3

OTHERS = ("٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "０１２３４５６７８９", "๐๑๒๓๔๕๖๗๘๙")
"""Digits of Arabic-Indic, Devanagari, full width and Thai."""
PLAN = {"--hardware": "8xH200", "--workload": "in=200,out=100"}


def foreign(text: str) -> str:
    """`text` with one digit of another script, of the same value."""
    digits, place = random.choice(OTHERS), random.choice([i for i, sign in enumerate(text) if sign.isdigit()])
    return text[:place] + digits[int(text[place])] + text[place + 1 :]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--hardware", "8xH200"), ("--workload", "in=200,out=100"), ("--slo", "ttft=2s,itl=50ms"),
        ("--concurrency", "16"), ("--top", "2"), ("--mtp-acceptance", "0.8"), ("--tp-size", "8"),
        ("--mem-fraction-static", "0.8"), ("--context-length", "8k"), ("--cuda-graph-bs", "1 2"),
    ],
)  # fmt: skip
def test_a_plan_refuses_digits_of_other_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag, value):
    (tmp_path / "config.json").write_text(json.dumps(V3))
    given = PLAN | {flag: foreign(value)}
    words = [word for pair in given.items() for word in pair]
    assert main(["plan", "--model-path", str(tmp_path), *words]) != 0
    error = capsys.readouterr().err
    assert flag.removeprefix("--") in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("simulate", "--max-concurrency", "12"), ("simulate", "--request-rate", "1.5"), ("simulate", "--seed", "7"),
        ("router", "--port", "30000"), ("doctor", "--window", "2.5"),
    ],
)  # fmt: skip
def test_other_commands_refuse_them_too(capsys: pytest.CaptureFixture[str], command: str, flag: str, value: str):
    assert main([command, flag, foreign(value)]) != 0
    assert flag in capsys.readouterr().err


def test_numbers_are_read_as_python_reads_them():
    for text in (str(random.randrange(1 << 40)), "1_000", " 7 ", "-3"):
        assert READERS[int](text) == int(text) and READERS[float](text) == float(text)
    assert READERS[float]("1e-3") == 1e-3 and READERS[float]("inf") == float("inf")
