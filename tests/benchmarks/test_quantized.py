"""The benchmark of weight formats runs every format in turn and prints ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import quantized


def test_rows_are_ratios_to_the_first_format() -> None:
    table = quantized.rows({"none": [(2.0, 4.0), (4.0, 4.0)], "int4": [(1.0, 1.0), (1.0, 2.0)]})
    assert table[0]["decode_ratio"] == [1, 1, 1] and table[1]["prefill_ratio"] == [3, 2, 4]
    assert table[1]["decode_ratio"] == [3, 2, 4] and table[1]["decode_seconds"] == 1.5


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    options = ["--shape", "moe-tiny", "--batch-size", "1", "--input-len", "8", "--output-len", "3", "--rounds", "1"]
    assert quantized.main([*options, "--result-file", str(file)]) == 0
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["format"] for row in found] == ["none", "int8", "int4"] and "decode" in capsys.readouterr().out
    assert all(row["decode_seconds"] > 0 and row["decode_ratio"][0] > 0 for row in found)
