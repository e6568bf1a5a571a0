"""The benchmark of simulated multi-turn load: a small KV cache, and the first turns of its sessions."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import multi_turn_simulated
from benchmarks.multi_turn_simulated import Closed
from moe_engine.tuning.simulator.agents import AgentShape


def test_a_small_cache(tmp_path: Path) -> None:
    words = ["--max-total-tokens", "6000", "--input-len", "300", "--output-len", "10", "--turns", "4", "--pause", "1"]
    words += ["--warm", "3", "--seconds", "6", "--loads", "2", "--seeds", "0", "1"]
    words += ["--json", str(tmp_path / "result.json")]
    assert multi_turn_simulated.main([*words, "--plot", str(tmp_path / "plot.png")]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    recompute, hold = result["points"][:2]
    assert len(result["points"]) == 4 and "hold: least throughput behind the peak, seed 1" in result["verdicts"]
    assert recompute["way"] == "recompute" and hold["sessions"] == recompute["sessions"] == 15
    assert hold["cached_share"] > recompute["cached_share"] and hold["turns"] > 3
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_sessions_that_fit_begin_in_the_middle_of_their_lives() -> None:
    shape = AgentShape(turns=5, system_len=0, input_len=10, output_len=4, pause=1.0)
    sessions = Closed(shape, 40, 30, 3.0, 100.0, 1)
    first = list(sessions.first())
    assert {arrival.turn for arrival in first[:30]} == set(range(5))
    assert not any(arrival.turn for arrival in first[30:])  # these exceed the cache
    assert all(0 <= arrival.seconds <= 3 for arrival in first)
    assert not any(sessions.returning[arrival.seconds] for arrival in first)
    one = next(arrival for arrival in first if arrival.turn == 3)
    last = sessions.after(one, 10.0)
    assert last is not None and last.turn == 4 and sessions.returning[last.seconds] and last.seconds > 10
    new = sessions.after(last, 20.0)
    assert new is not None and new.turn == 0 and new.seconds == 20 and not sessions.returning[20.0]
    assert sessions.after(new, 101.0) is None
