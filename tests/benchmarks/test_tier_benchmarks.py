"""The benchmarks of KV tiers and of routing by prefix: the scheduler's part at a small size, and the verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import dp_routing, tier_steps


def test_steps_of_the_scheduler_with_each_tier(tmp_path: Path) -> None:
    words = ["--only-scheduler", "--quick", "--prompt-len", "1024", "--steps", "60", "--decodes", "2", "--every", "8"]
    tier_steps.main([*words, "--json", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["scheduler"]) == set(tier_steps.WAYS) and result["engine"] is None
    assert all(0 < part["decode_p50_us"] <= part["decode_max_us"] for part in result["scheduler"].values())


def test_verdicts() -> None:
    scheduler = {way: {"decode_p99_us": 1e3 * us} for way, us in zip(tier_steps.WAYS, (0.0, 1.0, 2.0))}
    engine = {way: {"p99_ms": ms, "cpu_ms_per_token": 2.0} for way, ms in zip(tier_steps.WAYS, (10.0, 10.0, 15.0))}
    found = tier_steps.verdicts(scheduler, engine, 20.0)
    assert found["storage: p99 of decodes of 20 ms, over no tier"] == pytest.approx(1.1)
    assert found["storage: p99 of the gaps, over no tier"] == 1.5 and found["host: p99 of the gaps, over no tier"] == 1
    points = [
        {"workload": "sessions", "method": method, "cached_share": share}
        for method, share in (("one", 0.8), ("cache_aware", 0.76))
    ]
    assert list(dp_routing.verdicts(points).values()) == [pytest.approx(0.95)]
