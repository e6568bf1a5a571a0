"""Prompts with a shared prefix: detected exactly, computed in the cheaper form, with the same results."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.models.layers.attention import mla_chunks
from moe_engine.worker.batch.mla_form import MLAFormPolicy
from moe_engine.worker.batch.shared_prefix import LEAST, Sharers, find_sharers
from tests.engine.harness import InProcessEngine, Scripted
from tests.models.checkpoints import make_checkpoint


@settings(max_examples=60)
@given(st.data())
def test_all_sharers_are_found_with_their_length(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    num_rows, width = 10, 300
    table = rng.permutation(num_rows * width).reshape(num_rows, width).astype(np.int32)
    for _ in range(data.draw(st.integers(0, 4))):  # some rows share a prefix
        one, other = rng.integers(0, num_rows, 2)
        count = int(rng.integers(1, width))
        table[other, :count] = table[one, :count]
    rows = rng.permutation(num_rows)
    starts = rng.choice([LEAST - 1, LEAST, LEAST + 1, width - 1], num_rows)
    runs = [run for run in range(num_rows) if rng.random() < 0.8]
    candidates = defaultdict(list)
    for run in runs:
        if starts[run] >= LEAST:
            candidates[table[rows[run], 0]].append(run)
    expected = []
    for members in candidates.values():
        columns = table[rows[members], : min(starts[members])].T
        length = next((i for i, column in enumerate(columns) if len(set(column)) > 1), len(columns))
        if len(members) > 1 and length >= LEAST:
            expected.append(Sharers(members, length))
    assert find_sharers(table, rows, starts, runs) == expected


def test_a_prefix_expanded_for_others_costs_less() -> None:
    policy = MLAFormPolicy(170.0, shares=True)
    assert policy.absorbed(512, 32) and policy.absorbed(512, 32, 512 * 0.5)
    assert not policy.absorbed(512, 32, 512 * (1 - 1 / 32))
    assert MLAFormPolicy(170.0, deterministic=True, shares=True).absorbed(512, 32, 500)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_answers_do_not_depend_on_sharing(kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with one cached prefix, computed in one step: with shared expansion, or separately."""
    path = make_checkpoint("deepseek_v3", tmp_path / "model", seed=2, max_position_embeddings=1024)
    engine = InProcessEngine(
        path, tmp_path / "board", dtype="float32", cpu_threads=1, max_total_tokens=4096, max_running_requests=12,
        kv_cache_dtype=kv_cache_dtype, disable_overlap_schedule=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)

    def some(count: int) -> list[int]:
        return torch.randint(20, 250, (count,), generator=generator).tolist()

    beginning = some(150)
    script = [Scripted("first-", beginning + some(5), 4, arrives=0, sampling={"ignore_eos": True, "temperature": 0})]
    script += [
        Scripted(f"r{i}-", beginning + some(12 + i), 12, arrives=12, sampling={"ignore_eos": True, "temperature": 0})
        for i in range(8)
    ]
    made: list[int] = []
    original = mla_chunks._share

    def counted(prefill: object, run: mla_chunks.SharedRun, backend: object) -> object:
        made.append(run.last - run.first)
        return original(prefill, run, backend)  # type: ignore[arg-type]

    monkeypatch.setattr(mla_chunks, "_share", counted)
    try:
        if not engine.worker.runner.forward.builder._form.shares:
            pytest.skip("no kernel here shares contexts (no C++ compiler)")
        answers = []
        for shares in (True, False):
            engine.worker.runner.forward.builder._form = MLAFormPolicy(20.0, shares=shares)
            before = len(made)
            answers.append({rid: answer.token_ids for rid, answer in engine.run(script).items()})
            assert (len(made) > before) == shares
        assert max(made) > 1
        assert list(answers[0].values()) == list(answers[1].values())
    finally:
        engine.close()
