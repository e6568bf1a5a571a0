"""Replayed decode steps have the tokens of eager steps, for any padding; all ranks choose the same graph."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.stub_model import StubAttention, stub_runner
from moe_engine.errors import StepError
from moe_engine.models.batch import ForwardBatch
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.parallel.topology import Topology
from moe_engine.types import (
    GraphSettings,
    NewRow,
    SamplingParams,
    Speculation,
    SpeculationConfig,
    StepFacts,
    StepPlan,
    StepResult,
)
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.eplb.expert_recording_model import ExpertRecordingModel
from moe_engine.worker.graphs.graph_setup import capture_graphs
from moe_engine.worker.graphs.step_graphs import CaptureError, StepGraphs, StepShape
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.sampling.logits_passes import LogitsPasses
from tests.engine.harness import InProcessEngine, Scripted
from tests.speculation.agreeing import agreeing_checkpoint
from tests.worker.fake_graphs import FakeGraphs, ReplayableTorch

VOCAB = 250
DRAFTS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3_moe", "deepseek_v3 with drafts"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[InProcessEngine]:
    kind, _, drafts = request.param.partition(" ")
    path = agreeing_checkpoint(kind, folder / request.param, 3, num_mtp_layers=int(bool(drafts)))
    flags: dict[str, Any] = {}
    if drafts:
        flags = {"speculative_num_steps": DRAFTS, "speculative_num_draft_tokens": DRAFTS + 1}
        flags |= {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 1}
    made = InProcessEngine(
        path, folder / "board", dtype="float32", attention_backend="torch", cpu_threads=1, page_size=4,
        max_total_tokens=2048, max_running_requests=8, **flags,
    )  # fmt: skip
    yield made
    made.close()


def _script(count: int, seed: int) -> list[Scripted]:
    pick = random.Random(seed)
    script = []
    for i in range(count):
        sampling: dict[str, Any] = {"temperature": 0.0}
        if i % 3 == 1:
            sampling = {"temperature": 0.9, "top_p": 0.9}
        elif i % 3 == 2:
            sampling["frequency_penalty"] = 0.7  # edits its logits in place
        prompt = [pick.randrange(VOCAB) for _ in range(pick.randint(1, 30))]
        script.append(
            Scripted(
                f"r{i}", prompt, pick.randint(3, 20), pick.randrange(12), None, sampling, seed=i, logprob=i % 4 == 0
            )
        )
    return script


def _watched(engine: InProcessEngine) -> list[tuple[StepPlan, StepResult]]:
    """Every further plan with its result."""
    seen: list[tuple[StepPlan, StepResult]] = []
    execute = engine.worker.runner.execute

    def watch(plan: StepPlan) -> StepResult:
        seen.append((plan, execute(plan)))
        return seen[-1][1]

    engine.worker.runner.execute = watch  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("rows_at_once", [1 << 30, 5])
@pytest.mark.parametrize("settings", [GraphSettings((1, 2, 4, 7)), GraphSettings((1, 2, 3, 5), pad=False)], ids=repr)
def test_replayed_steps_make_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, engine: InProcessEngine, settings: GraphSettings, rows_at_once: int
) -> None:
    """Steps with more rows of logits than allowed at once are captured without the LM head."""
    monkeypatch.setattr(engine.worker.runner.sampler, "passes", LogitsPasses(rows_at_once))
    runner, script = engine.worker.runner, _script(12, len(settings.sizes))
    drafts = runner.speculation is not None
    settings = replace(settings, counts=(1, DRAFTS + 1) if drafts else (1,))
    expected = engine.run(script)
    backend, attention = FakeGraphs(), ReplayableTorch(runner.attention)
    plain, runner.attention = runner.attention, attention
    assert capture_graphs(runner, settings, backend=backend) == settings.num_graphs == len(backend.recordings)
    attention.renewed.clear()
    execute, seen = runner.execute, _watched(engine)
    try:
        found = engine.run(script)
    finally:
        runner.attention, runner.execute, runner.graphs = plain, execute, None  # type: ignore[method-assign]
    for rid, answer in expected.items():
        assert found[rid].token_ids == answer.token_ids, rid
        got, want = ([entry[1] for entry in a.logprobs] for a in (found[rid], answer))
        assert got == pytest.approx(want, abs=1e-4)
    replayed = [(plan, result) for plan, result in seen if result.cuda_graph]
    assert len(replayed) == backend.num_replays == len(attention.renewed) > 3
    assert all(len(plan.rows) == plan.num_decodes for plan, _ in replayed)
    if settings.pad:
        assert {len(plan.rows) for plan, _ in replayed} - set(settings.sizes)
    if drafts:
        assert {count for plan, _ in replayed for count in plan.counts} >= {DRAFTS + 1}
    for host, device in attention.renewed:
        assert host == device and len(host) in settings.sizes
    ran_eagerly = [plan for plan, result in seen if plan.rows and not result.cuda_graph]
    assert any(len(plan.rows) > plan.num_decodes for plan in ran_eagerly)  # prompts
    for layer in runner.kv_pool.layers:
        assert all(part[: runner.kv_pool.page_size].isfinite().all() for part in layer)


# -- which steps are replayed


class Counting:
    """A model of one number per token; records the sizes of its runs."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []
        self.heads: list[tuple[int, ...]] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.batches.append(batch)
        return batch.input_ids[:, None].float()

    def logits(self, hidden: torch.Tensor, sizes: StepSizes | None = None) -> torch.Tensor:
        if sizes is not None:
            self.heads.append(sizes.logits)
        return -((hidden + 1 - torch.arange(64)) ** 2)


def _runner(
    settings: GraphSettings, num_groups: int = 1, group: int = 0, rows_at_once: int = 1 << 30
) -> tuple[ModelRunner, Counting, FakeGraphs]:
    stream = DeviceStream("cpu")
    pool = KVPool(KVSpec.mla(1, 4, 4, torch.float32), 256, 1, stream)
    parallel = ParallelContext()
    if num_groups > 1:
        parallel = ParallelContext(Topology(tp_size=num_groups, attn_dp_size=num_groups), group, decode_tokens=64)
    model, attention, backend = Counting(), ReplayableTorch(StubAttention()), FakeGraphs()
    rows = RequestRows(8, 100, 64, stream)
    passes = LogitsPasses(rows_at_once)
    runner = ModelRunner(model, pool, rows, attention, stream, parallel=parallel, passes=passes)  # type: ignore[arg-type]
    assert capture_graphs(runner, settings, backend=backend)
    model.batches.clear()
    model.heads.clear()
    return runner, model, backend


def _decodes(count: int, **more: Any) -> StepPlan:
    rows, ones = list(range(count)), [1] * count
    return StepPlan(1, rows, [3] * count, ones, [True] * count, [9 + i for i in rows], count, **more)


def _chains(counts: list[int], depth: int) -> StepPlan:
    num = len(counts)
    return StepPlan(
        1, list(range(num)), [3] * num, counts, [True] * num, num_decodes=num, speculation=Speculation(depth)
    )


def test_only_even_decodes_up_to_the_largest_size() -> None:
    runner, _, _ = _runner(GraphSettings((1, 4), counts=(1, 3)))
    graphs = runner.graphs
    assert graphs is not None
    prompt = StepPlan(1, [0], [0], [4], [True], [1, 2, 3, 4], 0, [5, 6, 7, 8])
    mixed = StepPlan(1, [0, 1], [3, 0], [1, 1], [True, True], [9, 10], 1, [5])
    assert [graphs.shape_of(_decodes(n)) for n in (1, 2, 4, 5)] == [
        StepShape(1, 1), StepShape(4, 1), StepShape(4, 1), None,
    ]  # fmt: skip
    assert graphs.shape_of(prompt) is graphs.shape_of(mixed) is None
    assert graphs.shape_of(_chains([3, 3], 2)) == StepShape(4, 3)
    assert graphs.shape_of(_chains([3, 1], 2)) is None and graphs.shape_of(_chains([2, 2], 1)) is None
    assert graphs.shape_of(_chains([1, 1, 1], 0)) == StepShape(4, 1)
    tree = SpeculationConfig("nextn", 2, topk=2, num_draft_tokens=5)
    assert graphs.shape_of(_chains([tree.num_nodes(2)] * 2, 2)) is None


@pytest.mark.parametrize("rows_at_once", [1 << 30, 2])
def test_all_attention_groups_replay_the_same_size(rows_at_once: int) -> None:
    """Three, one and no decodes: all groups run four tokens each. Without the LM head in the graph, all groups run it
    as often as the largest one."""
    mine = [_decodes(3), _decodes(1), StepPlan(1)]
    facts = tuple(StepFacts.of(plan) for plan in mine)
    for group, plan in enumerate(mine):
        runner, model, backend = _runner(GraphSettings((1, 2, 4)), 3, group, rows_at_once)
        new = [NewRow(i, f"r{i}", [7 + i], 1, [], SamplingParams(temperature=0.0), 0, frozenset()) for i in plan.rows]
        first = StepPlan(0, new_rows=new, dp_facts=(StepFacts(),) * 3)
        runner.execute(first)
        runner.rows.last_token[: len(new)] = torch.arange(len(new)) + 20
        result = runner.execute(replace(plan, dp_facts=facts))
        assert result.tokens == [[21 + i] for i in range(len(new))] and backend.num_replays == 1
        (batch,) = model.batches
        assert batch.sizes is not None and batch.sizes.tokens == batch.sizes.logits == (4, 4, 4)
        assert batch.sizes.phase == "decode" and batch.num_tokens == 4
        assert (batch.slots[len(new) :] == 0).all() and (batch.positions[len(new) :] == 0).all()
        assert model.heads == ([(4, 4, 4)] if rows_at_once > 4 else [(2, 1, 0), (1, 0, 0)])


@pytest.mark.parametrize(
    "other", [StepFacts(5, 1, prefills=True), StepFacts(6, 6, num_drafting=2, depth=2), StepFacts(9, 9)], ids=repr
)
def test_no_group_replays_when_another_cannot(other: StepFacts) -> None:
    facts = (StepFacts(2, 2), other)
    for group, plan in enumerate((_decodes(2), StepPlan(1))):
        runner, _, _ = _runner(GraphSettings((1, 2, 4), counts=(1, 3)), 2, group)
        assert runner.graphs is not None and runner.graphs.shape_of(replace(plan, dp_facts=facts)) is None


def test_padding_has_no_data_of_larger_steps() -> None:
    runner, model, _ = _runner(GraphSettings((4,)))
    for count in (4, 1, 3, 2, 4):
        runner.execute(_decodes(count))
        batch = model.batches[-1]
        queries = batch.attention.decode
        assert queries is not None and batch.num_tokens == 4
        assert batch.positions.tolist() == [3] * count + [0] * (4 - count)
        assert batch.slots.tolist() == [9 + i for i in range(count)] + [0] * (4 - count)
        assert queries.context_lens == queries.context_lens_device.tolist() == [4] * count + [1] * (4 - count)
        assert queries.rows.tolist() == list(range(count)) + [0] * (4 - count)


def test_a_failed_copy_leaves_neutral_padding() -> None:
    """Padded tokens then write to slot 0, not to the slots of the failed step."""
    runner, model, _ = _runner(GraphSettings((4,)))
    runner.execute(_decodes(1))
    build = runner.builder.build

    def broken(plan: StepPlan) -> Any:
        batch = build(plan)
        return replace(batch, slots=torch.cat((batch.slots, batch.slots)))

    runner.builder.build = broken  # type: ignore[method-assign]
    with pytest.raises(StepError):
        runner.execute(_decodes(4))
    runner.builder.build = build  # type: ignore[method-assign]
    runner.execute(replace(_decodes(1), number=9))
    batch = model.batches[-1]
    assert batch.positions.tolist() == [3, 0, 0, 0] and batch.slots.tolist() == [9, 0, 0, 0]


def test_recorded_passes_are_not_replayed() -> None:
    runner, model, backend = _runner(GraphSettings((4,)))
    recorder: Any = SimpleNamespace(wanted=True, counting=False, end_pass=lambda: None)
    runner.model = ExpertRecordingModel(model, recorder)  # type: ignore[arg-type]
    assert not runner.execute(_decodes(2)).cuda_graph and model.batches[-1].num_tokens == 2
    recorder.wanted = False
    assert runner.execute(_decodes(2)).cuda_graph and backend.num_replays == 1


# -- launches without graphs


def test_devices_and_backends_without_graphs_stay_eager(caplog: pytest.LogCaptureFixture) -> None:
    runner = stub_runner(max_rows=4)
    assert capture_graphs(runner, GraphSettings((1, 2))) == 0 and runner.graphs is None  # a CPU
    assert capture_graphs(runner, GraphSettings((1, 2)), backend=FakeGraphs()) == 0 and runner.graphs is None
    assert "the stub attention backend cannot be replayed" in caplog.text
    assert runner.attention.capabilities.plan_in_place is None


def test_a_refused_capture_names_the_flag_that_helps() -> None:
    class Refusing:
        def capture(self, run: object) -> object:
            raise RuntimeError("operation not permitted when stream is capturing")

    runner = stub_runner(max_rows=4)
    runner.attention = ReplayableTorch(runner.attention)  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"2 requests cannot be captured.*--disable-cuda-graph"):
        capture_graphs(runner, GraphSettings((1, 2)), backend=Refusing())  # type: ignore[arg-type]


def test_the_largest_graph_is_captured_first(capsys: pytest.CaptureFixture[str]) -> None:
    class Ordered(FakeGraphs):
        def capture(self, run: Any) -> Any:
            before = len(model.batches)
            run()
            order.append(model.batches[before].num_tokens)
            return super().capture(run)

    order: list[int] = []
    runner, model, _ = _runner(GraphSettings((1,)))
    assert capture_graphs(runner, GraphSettings((1, 3, 8), (1, 2)), progress=True, backend=Ordered()) == 6
    assert order == sorted(order, reverse=True) == [16, 8, 6, 3, 2, 1]
    assert "Capturing batches" in capsys.readouterr().err and isinstance(runner.graphs, StepGraphs)
