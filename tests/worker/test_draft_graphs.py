"""Captured steps with drafts, with a model that counts upwards: tokens, padding, and equal forwards of all groups.

Tokens of real models: `simulated_cuda/on_device/test_engines.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.stub_model import StubAttention
from moe_engine.models.batch import ForwardBatch
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.parallel.topology import Topology
from moe_engine.planning.memory.graphs import recorded
from moe_engine.types import NewRow, RowWrite, SamplingParams, Speculation, SpeculationConfig, StepFacts, StepPlan
from moe_engine.types.step_settings import GraphSettings
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.sampling.logits_passes import LogitsPasses
from moe_engine.worker.speculation.draft_batch import DraftBatches
from moe_engine.worker.speculation.mtp import MTPDrafter
from moe_engine.worker.speculation.step import SpeculativeStep
from moe_engine.worker.startup.graph_setup import capture_graphs
from tests.worker.repeated_calls import OnDevice, RepeatedCalls

VOCABULARY = 64


class Counting:
    """The token after n is n + 1. The draft is right unless n + 1 is a multiple of `wrong`. Records sizes of
    forwards."""

    fuses_drafts = attends_to_extend = windowed = False
    ids = None

    def __init__(self, wrong: int = 1000, num_layers: int = 1) -> None:
        self.wrong, self.num_layers = wrong, num_layers
        self.sizes: list[tuple[str, Any]] = []
        self.real: list[list[int]] = []
        self.followed: list[list[int]] = []

    def forward(self, *args: Any) -> Tensor:
        batch: ForwardBatch = args[-1]
        kind = "model" if len(args) == 1 else "draft"
        self.sizes.append((kind, None if batch.sizes is None else batch.sizes.tokens))
        assert batch.real is not None
        self.real.append(batch.real.tolist())
        after = (batch.input_ids if len(args) == 1 else args[1]) + 1
        if kind == "draft":
            after = torch.where(after % self.wrong == 0, 0, after)
        return after[:, None].float()

    def logits(
        self, hidden: Tensor, sizes: StepSizes | None = None, out: Tensor | None = None, layer: int = 0
    ) -> Tensor:
        self.sizes.append(("head", None if sizes is None else sizes.logits))
        logits = -((hidden - torch.arange(VOCABULARY)) ** 2)
        return logits if out is None else out.copy_(logits)

    def prepare(self, states: Tensor) -> Tensor:
        return states

    def remember(self, layer: int, ids: Tensor, hidden: Tensor, batch: ForwardBatch) -> None:
        self.followed.append(ids.tolist())


def drafting(
    settings: GraphSettings, *, groups: int = 1, group: int = 0, wrong: int = 1000, rows_at_once: int = 1 << 30,
    num_layers: int = 1, **more: Any,
) -> tuple[ModelRunner, Counting]:  # fmt: skip
    stream = DeviceStream("cpu")
    pool = KVPool(KVSpec.mla(1, 4, 4, torch.float32), 256, 1, stream)
    parallel = ParallelContext()
    if groups > 1:
        parallel = ParallelContext(Topology(tp_size=groups, attn_dp_size=groups), group, decode_tokens=64)
    model: Any = Counting(wrong, num_layers)
    attention: Any = OnDevice(StubAttention())
    depth = max(settings.counts) - 1
    rows = RequestRows(8, 100, VOCABULARY, stream, num_drafts=depth)
    runner = ModelRunner(model, pool, rows, attention, stream, parallel=parallel, passes=LogitsPasses(rows_at_once))
    batches = DraftBatches(runner.forward.builder, attention, pool.layers, stream)
    drafter = MTPDrafter(model, batches, rows, runner.sampler, stream, runner.shared, 1)
    drafter.states = torch.zeros(rows.max_rows, 1)
    drafter.last_states = torch.zeros(rows.max_rows, num_layers - 1, 1)
    config = SpeculationConfig("nextn", depth, **more)
    runner.speculation = SpeculativeStep(
        config, drafter, rows, runner.forward.builder, runner.sampler, pool, batches, stream
    )
    backend = RepeatedCalls()
    assert capture_graphs(runner, settings, backend=backend) == settings.num_graphs
    assert backend.num_captured == sum(recorded(settings, chains=True))  # the ledger's count
    assert runner.drafted is not None
    for noted in (model.sizes, model.real, model.followed):
        noted.clear()
    return runner, model


def entered(runner: ModelRunner, lasts: list[int], groups: int = 1) -> None:
    """Requests with three computed tokens, whose last tokens are `lasts`."""
    new = [
        NewRow(i, f"r{i}", [1, 1, 1, last], 4, [9 + 8 * i, 10 + 8 * i, 11 + 8 * i], SamplingParams(temperature=0.0), 0,
               frozenset())
        for i, last in enumerate(lasts)
    ]  # fmt: skip
    facts = {"dp_facts": (StepFacts(),) * groups} if groups > 1 else {}
    runner.execute(StepPlan(0, new_rows=new, **facts))  # type: ignore[arg-type]
    runner.rows.last_token[: len(lasts)] = torch.tensor(lasts, dtype=torch.int64)


def chains(num: int, depth: int, start: int = 3, **more: Any) -> StepPlan:
    reserved = [RowWrite(i, start, [12 + 8 * i + k for k in range(5)]) for i in range(num)]
    return StepPlan(
        1, list(range(num)), [start] * num, [depth + 1] * num, [True] * num, num_decodes=num,
        speculation=Speculation(depth, follow=True, reserved=reserved), **more,
    )  # fmt: skip


@pytest.mark.parametrize("rows_at_once", [1 << 30, 2])
def test_steps_accept_what_is_right(rows_at_once: int) -> None:
    """Two requests in a graph of three: drafts from 7 are correct up to 9, those from 20 completely. The next step
    starts after them, although its plan has the minimum length."""
    runner, model = drafting(GraphSettings((1, 3), counts=(1, 3)), wrong=10, rows_at_once=rows_at_once)
    entered(runner, [7, 20])
    result = runner.execute(chains(2, 2))
    assert result.cuda_graph and result.tokens == [[8, 9, 10], [21, 22, 23]]
    result = runner.execute(chains(2, 2, start=4))
    assert result.tokens == [[11, 12, 13], [24, 25, 26]]
    history = runner.rows.history
    assert history is not None and history.lengths[:2].tolist() == [9, 9]
    assert history.tokens[0, 4:10].tolist() == [8, 9, 10, 11, 12, 13]
    assert model.real[0] == [1, 1, 0] and model.real[2] == [1] * 6 + [0] * 3
    assert model.followed[0] == [8, 9, 10, 21, 22, 23, 0, 0, 0]
    entered(runner, [8])
    assert runner.execute(chains(1, 2)).tokens == [[9, 10]], "the draft for 10 was wrong"
    assert runner.execute(chains(1, 0, start=5)).tokens == [[11]], "a step without drafts follows too"


def test_simulated_acceptance() -> None:
    runner, _ = drafting(GraphSettings((2,), counts=(3,)), wrong=2, simulated_accept_length=2.0)
    entered(runner, [7, 8])
    assert [len(tokens) for tokens in runner.execute(chains(2, 2)).tokens] == [2, 2]


@pytest.mark.parametrize("rows_at_once", [1 << 30, 2])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("depth", [0, 2])
def test_all_attention_groups_run_the_same_forwards(depth: int, num_layers: int, rows_at_once: int) -> None:
    mine = [chains(3, depth), chains(1, depth), StepPlan(1)]
    facts = tuple(StepFacts.of(plan) for plan in mine)
    noted = []
    for group, plan in enumerate(mine):
        runner, model = drafting(
            GraphSettings((1, 4), counts=(1, 3)), groups=3, group=group, rows_at_once=rows_at_once,
            num_layers=num_layers,
        )  # fmt: skip
        entered(runner, [7 + i for i in range(len(plan.rows))], 3)
        model.sizes.clear()
        result = runner.execute(StepPlan(**{**{f: getattr(plan, f) for f in plan.__slots__}, "dp_facts": facts}))
        assert [len(tokens) for tokens in result.tokens] == [1 + depth] * len(plan.rows)
        noted.append(model.sizes)
    assert noted[0] == noted[1] == noted[2]
    forwards = [(4, 4, 4)] * depth + [(4 * (1 + depth),) * 3] + [(4 * (depth + num_layers),) * 3] * (num_layers - 1)
    assert [sizes for kind, sizes in noted[0] if kind != "head"] == forwards


def test_the_log_says_why_drafts_wait(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="moe_engine"), pytest.raises(AssertionError):
        drafting(GraphSettings((1,), counts=(1, 3)), topk=2, accept_threshold_single=0.5)
    assert "Drafts are not captured (trees with acceptance thresholds: the host draws a number" in caplog.text
