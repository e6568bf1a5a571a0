"""The launching thread never synchronizes with an accelerator in decodes, and only once in a step with drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.stub_model import StubAttention
from moe_engine.models.batch import ForwardBatch
from moe_engine.types import (
    GraphSettings,
    LogprobSpec,
    NewRow,
    RowWrite,
    SamplingParams,
    Speculation,
    SpeculationConfig,
    StepPlan,
)
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.graphs.graph_setup import capture_graphs
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.speculation.draft_batch import DraftBatches
from moe_engine.worker.speculation.drafter import Drafter
from moe_engine.worker.speculation.mtp import MTPDrafter
from moe_engine.worker.speculation.step import SpeculativeStep
from moe_engine.worker.worker import Worker
from tests.logprobs import unpack
from tests.speculation.toy_engine import FixedChain
from tests.worker import fake_accelerator
from tests.worker.fake_accelerator import FakeAccelerator, remote
from tests.worker.fake_graphs import FakeGraphs, ReplayableTorch

VOCAB, DEPTH = 64, 2
STEP_THREAD = "worker-steps"


class NextToken:
    """A model whose next token is the last one plus one."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.input_ids[:, None].float()

    def logits(self, hidden: torch.Tensor, sizes: object = None) -> torch.Tensor:
        return -((hidden + 1 - torch.arange(VOCAB)) ** 2)


class PassOn:
    """MTP layers that predict `NextToken`. Replaces `models.mtp.MTPLayers`."""

    num_layers, fuses_drafts = 1, False
    logits = NextToken().logits

    def forward(self, layer: int, input_ids: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        assert (hidden[:, 0].as_subclass(torch.Tensor) + 1 == input_ids.as_subclass(torch.Tensor)).all()
        return input_ids[:, None].float()

    def remember(self, layer: int, input_ids: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch) -> None:
        return None


def _drafter(kind: str, runner: ModelRunner, batches: DraftBatches) -> Drafter:
    if kind == "mtp":
        layers: Any = PassOn()
        return MTPDrafter(layers, batches, runner.rows, runner.sampler, runner.stream, hidden=1)
    drafter = FixedChain(runner, np.random.default_rng(0))
    drafter.table = remote(torch.eye(VOCAB).roll(1, 1))
    return drafter


def _worker(drafts: str = "", graphs: bool = False) -> Worker:
    stream = FakeAccelerator()
    pool = KVPool(KVSpec.mla(1, 4, 4, torch.float32), 256, 1, stream)
    config = SpeculationConfig("standalone", DEPTH) if drafts else None
    rows = RequestRows(8, 100, VOCAB, stream, num_drafts=DEPTH + 1 if drafts else 0)
    attention = ReplayableTorch(StubAttention())
    runner = ModelRunner(NextToken(), pool, rows, attention, stream)  # type: ignore[arg-type]
    if config is not None:
        batches = DraftBatches(runner.builder, attention, pool.layers, stream)  # type: ignore[arg-type]
        drafter = _drafter(drafts, runner, batches)
        runner.speculation = SpeculativeStep(
            config, drafter, rows, runner.builder, runner.sampler, pool, batches, stream
        )
    if graphs:
        assert capture_graphs(runner, GraphSettings((1, 2, 4), (1, DEPTH + 1)), backend=FakeGraphs())
    return Worker(runner)


def _prompts(samplings: list[SamplingParams], speculation: Speculation | None = None) -> StepPlan:
    rows = list(range(len(samplings)))
    news = [
        NewRow(row, f"r{row}", [7 + 2 * row, 9 + 2 * row], 2, [], samplings[row], row, frozenset(), max_length=90)
        for row in rows
    ]
    ids = [token for new in news for token in new.token_ids]
    slots = list(range(1, len(ids) + 1))
    return StepPlan(
        0, rows, [0] * len(rows), [2] * len(rows), [True] * len(rows), slots, 0, ids, news, speculation=speculation
    )


def _decodes(number: int, rows: list[int]) -> StepPlan:
    slots = [20 + 10 * number + row for row in rows]
    return StepPlan(number, rows, [1 + number] * len(rows), [1] * len(rows), [True] * len(rows), slots, len(rows))


def _on_step_thread() -> list[str]:
    return [what for what, thread in fake_accelerator.waits if thread.startswith(STEP_THREAD)]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=1e-3, top_k=5, top_p=0.9)], ids=repr
)
def test_decodes_never_wait(sampling: SamplingParams, graphs: bool) -> None:
    """Greedy and sampled, same rows and changing rows; a separate thread waits for results."""
    worker = _worker(graphs=graphs)
    worker.execute(_prompts([sampling] * 3)).result()
    fake_accelerator.waits.clear()
    plans = [_decodes(number, rows) for number, rows in enumerate(([0, 1, 2], [0, 1, 2], [2, 0], [1]), 1)]
    results = [future.result() for future in [worker.execute(plan) for plan in plans]]
    worker.close()
    assert [r.cuda_graph for r in results] == [graphs] * 4
    assert results[0].tokens == [[11], [13], [15]] and results[1].tokens == [[12], [14], [16]]
    assert results[2].tokens == [[17], [13]]
    assert _on_step_thread() == []
    assert [what for what, _ in fake_accelerator.waits] == ["wait"] * 4


def test_logprobs_never_wait() -> None:
    worker = _worker()
    plan = _prompts([SamplingParams(temperature=0.0)] * 2)
    spec = LogprobSpec(None, 2, (3,))
    new = [NewRow(n.row, n.rid, n.token_ids, 2, [], n.sampling, 0, frozenset(), logprobs=spec) for n in plan.new_rows]
    plan.new_rows[:] = new
    worker.execute(plan).result()
    fake_accelerator.waits.clear()
    result = worker.execute(_decodes(1, [0, 1])).result()
    worker.close()
    assert result.logprobs is not None
    assert result.logprobs[1] is not None and len(unpack(result.logprobs[1])[0].top) == 2
    assert _on_step_thread() == []


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("drafter", ["fixed", "mtp"])
def test_steps_with_drafts_wait_once(drafter: str, graphs: bool) -> None:
    """For the rows' true lengths, which give positions and slots of the step: attention is planned on the host."""
    worker = _worker(drafter, graphs)
    worker.execute(_prompts([SamplingParams(temperature=0.0)] * 2, Speculation(0, follow=True))).result()
    fake_accelerator.waits.clear()
    results = []
    for number in range(1, 4):
        reserved = [RowWrite(row, 2 + 3 * (number - 1), list(range(50 + 30 * row, 80 + 30 * row))) for row in (0, 1)]
        plan = StepPlan(
            number, [0, 1], [2, 2], [DEPTH + 1] * 2, [True] * 2, num_decodes=2,
            speculation=Speculation(DEPTH, follow=True, reserved=reserved),
        )  # fmt: skip
        results.append(worker.execute(plan).result())
    worker.close()
    assert [r.tokens for r in results] == [
        [[first, first + 1, first + 2], [first + 2, first + 3, first + 4]] for first in (11, 14, 17)
    ]
    assert [r.cuda_graph for r in results] == [graphs] * 3
    assert _on_step_thread() == ["read"] * 3
