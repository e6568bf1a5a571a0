"""Every figure of README.md's tables is from a result in benchmarks/results, with its qualification."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme_figures

ABOUT = {"machine": {"num_cpus": 2, "cpu": "a CPU", "load_1min_at_start": 0.1}, "date": "2026-11-22T10:00:00+0000"}


def test_the_readme_says_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert readme_figures.main(["--check"]) == 0, capsys.readouterr().out


def test_every_table_with_figures_is_written_from_results() -> None:
    text, written = readme_figures.BLOCK.subn("", readme_figures.README.read_text())
    version, figure = re.compile(r"\b[A-Z][\w-]*[ -]\d+\.\d+\b(?! ?%)"), re.compile(r"\b\d+(x| ?%|\.\d)")
    rows = [line for line in text.splitlines() if line.startswith("|") and figure.search(version.sub("", line))]
    assert written >= 3 and rows == []


def test_another_figure_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(re.sub(r"(\d\.\d)x", "9.9x", readme_figures.README.read_text()))
    assert readme_figures.main(["--check", "--readme", str(readme)]) == 1
    assert "9.9x" in capsys.readouterr().out
    assert readme_figures.main(["--write", "--readme", str(readme)]) == 0
    assert readme.read_text() == readme_figures.README.read_text()


@pytest.mark.parametrize(
    ("block", "words"),
    [("weather 2026-11-21_cpu_startup", "unknown table weather"), ("speed nothing", "no such result")],
)
def test_a_block_without_a_result_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], block: str, words: str
) -> None:
    (tmp_path / "README.md").write_text(f"<!-- figures: {block} -->\n<!-- end of figures -->\n")
    assert readme_figures.main(["--readme", str(tmp_path / "README.md")]) == 2
    assert words in capsys.readouterr().err


def side_by_side(engine: list[float], fractions: list[float], peer: list[float], **values: Any) -> dict[str, Any]:
    one = {"engine": {"seconds": engine, "fractions_of_limit": fractions}}
    if peer:
        one |= {"ratio": 0.0, "transformers": {"seconds": peer}}
    return {
        "about": ABOUT,
        "shape": "moe-390m",
        "transformers_probes_seconds": {"W1": {"eager": 1.0}},
        "results": {"W1": one},
    } | values


def test_speed_says_what_was_not_looked_for() -> None:
    good = side_by_side([1.0, 2.0, 1.28], [0.8, 0.9, 0.86], [5.0, 12.0])
    row = "| one stream, 128 in, 128 out | 100 (64 to 128) | 86% (80% to 90%) | 63% (llama.cpp) | 5.5x (5.0x to 6.0x) |"
    assert row in readme_figures.speed([good])
    assert "other programs" not in readme_figures.speed([good]).lower()
    poor = side_by_side([1.0], [0.4], [3.0], transformers_probes_seconds={})
    text = readme_figures.speed([poor])
    assert "| 40% |" in text and "3.0x \\*" in text
    assert "its quickest way was not looked for" in text
    assert "| not measured |" in readme_figures.speed([side_by_side([1.0], [0.6], [])])


def test_a_machine_that_was_not_quiet_is_named() -> None:
    busy = side_by_side([1.0], [0.6], [], about={**ABOUT, "machine": {**ABOUT["machine"], "load_1min_at_start": 2.5}})
    assert "Other programs were at work (load 2.5)." in readme_figures.speed([busy])


@pytest.mark.parametrize(
    ("off", "auto", "cell"),
    [
        ([2.0, 2.2, 2.4], [1.0, 1.0, 1.0], "2.20x (2.00x to 2.40x)"),
        ([1.1, 0.9, 1.3], [1.0, 1.0, 1.0], "no difference (0.90x to 1.30x)"),
        ([0.8, 0.9], [1.0, 1.0], "0.85x (0.80x to 0.90x)"),
    ],
)
def test_a_gain_within_the_noise_is_none(off: list[float], auto: list[float], cell: str) -> None:
    sides = {"1": {"off": {"seconds": off}, "auto": {"seconds": auto}}}
    result = {"about": ABOUT, "options": {"agreement": 0.8}, "models": {"random": {"concurrency": sides}}}
    assert f"| the same shape, drafts never right | {cell} |" in readme_figures.speculation([result])


def test_a_smoke_test_holds_no_figures(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(side_by_side([1.0], [0.6], [], quick=True)))
    with pytest.raises(ValueError, match="smoke test"):
        readme_figures.filled("<!-- figures: speed r -->\n<!-- end of figures -->", tmp_path)
