"""The fit of the planner's constants: recovers constants that made the points; the stored ones keep their promise."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner_fit import PRIOR, fit, residuals, share_of, toml_of
from benchmarks.planner_points import Point, read_points
from benchmarks.planner_published import SYSTEMS
from moe_engine.tuning.costs.efficiency import Efficiency, engines, load_efficiency
from moe_engine.tuning.costs.form import Form


def error(errors: np.ndarray, share: float) -> float:
    return float(np.quantile(np.abs(np.exp(errors) - 1), share))


def invented(truth: Efficiency, count: int) -> list[Point]:
    """Points that the model with these constants makes, with 5 % of noise."""
    points = []
    for _ in range(count):
        ranks = random.choice([4, 8])
        model, dtype = random.choice([("deepseek-ai/DeepSeek-V3", "fp8"), ("MiniMaxAI/MiniMax-M2.5", "fp8")])
        prompt, output = random.choice([900.0, 7000.0]), random.choice([900.0, 4000.0])
        point = Point(
            "any", model, random.choice(["h200", "b200"]), dtype, Form(ranks), prompt, output,
            float(random.choice([4, 16, 64, 128])), 1.0, 1.0, (str(random.random()),),
        )  # fmt: skip
        made = np.exp(residuals([point], truth)[0] + np.random.normal(0, 0.05, 2))
        points.append(replace(point, tpot_ms=float(made[0]), ttft_ms=float(made[1])))
    return points


def test_a_fit_predicts_points_of_unknown_constants():
    np.random.seed(random.randrange(2**31))
    truth = share_of("any", np.array([random.gauss(0, 0.5 * sd) for _, sd in PRIOR.values()]))
    points = invented(truth, 120)
    share = fit(points[:60], "any")
    judged = residuals(points[60:], share)
    assert error(judged[:, 0], 0.5) < 0.1 and error(judged[:, 1], 0.5) < 0.15
    untrained = residuals(points[60:], share_of("any", np.zeros(len(PRIOR))))
    assert error(judged[:, 0], 0.5) < error(untrained[:, 0], 0.5) + 0.02  # the truth may be close to the prior


def test_a_fitted_file_reads_back(tmp_path, monkeypatch):
    share = replace(share_of("some", np.zeros(len(PRIOR))), deviations={"1x2x3 fp8 h200": 1.25})
    monkeypatch.setattr("moe_engine.tuning.costs.efficiency.FOLDER", tmp_path)
    (tmp_path / "some.toml").write_text(toml_of(share, 7))
    read = load_efficiency("some")
    assert read.deviations == {"1x2x3 fp8 h200": 1.25}
    assert all(math.isclose(getattr(read, name), getattr(share, name), rel_tol=1e-3) for name in PRIOR)


def test_stored_constants_keep_the_promise_on_their_points():
    """Held-out points have a report of their own (docs/plan.md); on its own points a fit must be no worse."""
    points, errors = read_points(), []
    for engine in ("sglang", "trtllm", "vllm"):
        own = [point for point in points if point.engine == engine]
        assert len(own) > 300
        errors.append(residuals(own, load_efficiency(engine)))
    every = np.concatenate(errors)
    assert error(every[:, 0], 0.5) <= 0.15 and error(every[:, 0], 0.9) <= 0.40
    assert error(every[:, 1], 0.5) <= 0.30


@pytest.mark.parametrize("engine", engines())
def test_constants_are_shares_of_the_hardware(engine: str):
    share = load_efficiency(engine)
    for name in ("hbm", "experts_hbm", "attention_hbm", "flops", "attention_flops", "link"):
        assert 0 < getattr(share, name) <= 1, name
    assert all(0.3 < factor < 3 for factor in share.deviations.values())


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_published_systems_are_predicted(system):
    assert abs(system.error) <= 0.305, f"{system.error:+.0%}"


def test_the_ablations_go_the_published_way():
    rates = {system.name.strip(): system.predicted for system in SYSTEMS[:6]}
    full = rates["96xH100 prefill 2K (LMSYS 2025-05-05)"]
    assert full > rates["without two-batch overlap"] > rates["without EPLB"]
