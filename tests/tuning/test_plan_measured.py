"""`moe-engine plan --cost-file`: a launch is predicted from its measured step costs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from moe_engine.cli.main import main
from moe_engine.tuning.costs.measured import CostFile, Curve

STEP, ROW, TOKEN = (random.uniform(1e-3, 3e-3), random.uniform(1e-5, 1e-4), random.uniform(1e-5, 5e-5))
"""Seconds of a step, of a request in it, and of a prompt token."""


def cost_file(folder: Path, **values: Any) -> str:
    """Costs of a launch with default flags, linear in requests and prompt tokens."""
    decode = Curve((1.0, 64.0), (STEP + ROW, STEP + 64 * ROW))
    prefill = Curve((1.0, 256.0), (STEP + TOKEN, STEP + 256 * TOKEN))
    (folder / "costs.json").write_text(CostFile(**{"decode": {0: decode}, "prefill": prefill, **values}).to_json())
    return str(folder / "costs.json")


def plan(capsys: pytest.CaptureFixture[str], path: str, *argv: str) -> dict[str, Any]:
    code = main(["plan", "--cost-file", path, "--workload", "in=50,out=40", *argv, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)["plans"][0]


def test_one_request_takes_its_measured_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = plan(capsys, cost_file(tmp_path, answer_seconds=0.004), "--concurrency", "1")
    values = found["predicted"]
    assert values["tpot_ms"] == pytest.approx(1e3 * (STEP + ROW))
    # the prompt's step beside a decode, half a step until it begins, and HTTP
    assert values["ttft_ms"] == pytest.approx(1e3 * (0.004 + 50 * TOKEN + STEP + 0.5 * (STEP + ROW)), rel=0.3)
    assert found["concurrency"] == 1 and found["command"].startswith("moe-engine serve")
    assert "sbatch" not in found


def test_requests_beside_each_other_share_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Between two tokens of a request: a step of all, and the prompts of the others spread over its answer."""
    values = plan(capsys, cost_file(tmp_path), "--concurrency", "16")["predicted"]
    one = plan(capsys, cost_file(tmp_path), "--concurrency", "1")["predicted"]
    step = STEP + 16 * ROW
    assert step < values["tpot_ms"] / 1e3 <= step + 15 * (STEP + 50 * TOKEN) / 40
    assert values["output_tokens_per_second"] > 4 * one["output_tokens_per_second"]


def test_equal_requests_wait_for_all_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """16 prompts of 50 tokens are four steps of the default chunk of 256 tokens or fewer longer ones."""
    path = cost_file(tmp_path)
    values = plan(capsys, path, "--workload", "in=50,out=40,equal=1", "--concurrency", "16")["predicted"]
    varied = plan(capsys, path, "--concurrency", "16")["predicted"]
    last = 1e3 * 16 * 50 * TOKEN
    assert varied["ttft_ms"] < values["ttft_ms"] <= values["ttft_p99_ms"]
    assert last < values["ttft_p99_ms"] < last + 1e3 * 16 * STEP


def test_the_front_end_bounds_the_rate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    slow = cost_file(tmp_path, request_seconds=0.01, token_seconds=1e-3)
    rate = plan(capsys, slow, "--concurrency", "32")["predicted"]["output_tokens_per_second"]
    assert rate == pytest.approx(40 / (0.01 + 40 * 1e-3), rel=0.01)
    path = cost_file(tmp_path, request_seconds=0.01, results_seconds=0.02, conditions={"disturbed": "cc1plus 30 %"})
    assert main(["plan", "--cost-file", path, "--workload", "in=50,out=40", "--concurrency", "32", "--json"]) == 0
    shown = capsys.readouterr()
    rate = json.loads(shown.out)["plans"][0]["predicted"]["output_tokens_per_second"]
    assert rate == pytest.approx(40 / (0.01 + 40 * 0.02 / 32), rel=0.01)  # 32 requests share the results of a step
    assert f"note: {path} may be wrong: cc1plus 30 %; calibrate again" in shown.err


def test_without_concurrency_the_best_within_the_limits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = cost_file(tmp_path)
    free, limit = plan(capsys, path), 1e3 * (STEP + ROW) * 1.5
    bound = plan(capsys, path, "--slo", f"itl={limit:.4f}ms")
    assert free["predicted"]["tpot_ms"] > limit >= bound["predicted"]["tpot_ms"]
    assert free["concurrency"] > bound["concurrency"] >= 1


def test_drafts_are_accepted_as_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    curve = Curve((1.0,), (STEP,))
    flags = ["--speculative-algorithm", "NGRAM", "--speculative-num-steps", "2", "--speculative-num-draft-tokens", "3"]
    launch = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 2}
    path = cost_file(tmp_path, decode={2: curve}, acceptance=(0.5, 0.4), launch=launch)
    values = plan(capsys, path, *flags, "--concurrency", "1")["predicted"]
    assert values["tpot_ms"] == pytest.approx(1e3 * STEP / (1 + 0.5 + 0.2))


def test_wrong_files_and_flags_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    path = cost_file(other, launch={"tp_size": 2, "model_path": "/models/other"})
    load = ["--workload", "in=50,out=40"]
    for argv, words in (
        (["--cost-file", path, *load], "measured with --model-path /models/other (here not given), --tp-size 2"),
        (["--cost-file", path, *load, "--hardware", "8xH200"], "--hardware with --cost-file"),
        (["--cost-file", path, *load, "--like", "vllm"], "--like with --cost-file"),
        (["--cost-file", str(tmp_path / "none"), *load], "cannot read it"),
        (["--cost-file", path], "--cost-file belongs to --workload"),
        (["--cost-file", cost_file(tmp_path), "--workload", "in=50,out=999999"], "the context length is"),
        (["--cost-file", cost_file(tmp_path), *load, "--concurrency", "100000"], "lower --concurrency"),
        (["--cost-file", cost_file(tmp_path), *load, "--slo", "itl=1us"], "the nearest is ttft="),
    ):
        assert main(["plan", *argv]) == 2
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if not line.startswith("no --model-path")]
        assert len(lines) == 1 and words in lines[0] and not captured.out, captured.err


@pytest.mark.parametrize(
    "damage",
    [
        {"decode": {}},
        {"decode": {"0": {"counts": [1], "seconds": [math.nan]}}},
        {"prefill": {"counts": [1], "seconds": [math.inf]}},
        {"arrival_seconds": "long"},
        {"end_seconds": -1},
        {"request_seconds": math.nan},
        {"acceptance": [3.0]},
        {"launch": "serve --tp 2"},
    ],
    ids=str,
)
def test_damaged_numbers_of_a_cost_file_are_refused(
    damage: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = Path(cost_file(tmp_path))
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    assert main(["plan", "--cost-file", str(path), "--workload", "in=50,out=40", "--concurrency", "1"]) == 2
    assert f"--cost-file {path}: damaged: " in capsys.readouterr().err
