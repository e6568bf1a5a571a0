"""The benchmark of multi-turn load: sessions over a fake engine, and its verdicts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import multi_turn_load
from benchmarks.multi_turn_load import Sessions, Shape

SHAPE = Shape(pool=400, prompt=80, turn=3, output=4, turns=5, pause=0.001)


class MadeUpEngine:
    """Answers with counted tokens; a prompt that continues an answered text is cached up to the end of that text."""

    info = SimpleNamespace(vocab_size=1000)

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def async_generate(self, input_ids: list[int], sampling_params: Any, stream: bool) -> AsyncIterator[Any]:
        assert stream and sampling_params["ignore_eos"]
        cached = max((len(old) for old in self.prompts if input_ids[: len(old)] == old), default=0)
        self.prompts.append(list(input_ids))
        return self._chunks(sampling_params["max_new_tokens"], cached)

    async def _chunks(self, count: int, cached: int) -> AsyncIterator[Any]:
        for done in range(1, count + 1):
            await asyncio.sleep(0.0005)
            yield {
                "output_ids": list(range(done)),
                "meta_info": {"cached_tokens": cached, "cached_tokens_details": {"device": 0, "host": cached}},
            }


def test_sessions_return_with_their_history() -> None:
    engine = MadeUpEngine()
    sessions = Sessions(engine, SHAPE, SHAPE.num_sessions(1), random.Random(3))  # type: ignore[arg-type]
    measured, spent = asyncio.run(sessions.run(0.0, 0.3))
    turns = len(measured.first) + len(measured.returning)
    assert turns > 10 and measured.num_tokens == SHAPE.output * turns and spent >= 0.3
    assert len(measured.returning) > len(measured.first)
    assert len(measured.gaps) == (SHAPE.output - 1) * turns
    assert measured.tiers["device"] == 0 and 0 < measured.tiers["host"] < measured.prompt_tokens
    assert max(map(len, engine.prompts)) == SHAPE.prompt + (SHAPE.turns - 1) * (SHAPE.turn + SHAPE.output)


def test_verdicts_and_plot(tmp_path: Path) -> None:
    def made(way: str, load: float, rate: float, first: float | None) -> dict[str, Any]:
        times = None if first is None else {"median": first, "p90": first, "p99": first}
        gaps = {"median": 0.01, "p90": 0.01, "p99": 0.01 * rate}
        return {"way": way, "load": load, "tokens_per_second": rate, "ttft_returning": times, "gaps": gaps}

    points = [made("recompute", 1, 10, 0.6), made("tier", 1, 8, 0.1), made("recompute", 2, 4, None)]
    points += [made("tier", 2, 10, 0.1), made("tier", 4, 9, 0.1)]
    found = multi_turn_load.verdicts(points)
    assert found["recompute: least throughput behind the peak"] == 0.4
    assert found["tier: least throughput behind the peak"] == 0.9  # the rise before the peak is not a fall
    assert abs(found["tier, load 1: time to first token of returning turns, better by"] - 6) < 1e-9
    assert abs(found["tier, load 1: p99 gap of tokens, ratio"] - 0.8) < 1e-9
    assert not any("load 4" in name for name in found)
    multi_turn_load.draw(points, tmp_path / "curve.png", "made up")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_options() -> None:
    quick = multi_turn_load.parse_arguments(["--quick", "--no-json"])
    assert quick.loads == [1, 2] and quick.seconds == 2.0 and quick.warm == 1.0
    larger = multi_turn_load.parse_arguments(["--model-path", "moe-390m"])
    assert larger.loads == [0.5, 1, 2, 4] and larger.seconds == 60.0
