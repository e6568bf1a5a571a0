"""Replayed steps and their padding; all attention groups choose the same graph.

Tokens of replayed steps: `simulated_cuda/on_device/test_engines.py`.
"""

from __future__ import annotations

from dataclasses import replace
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
from moe_engine.types import NewRow, SamplingParams, Speculation, SpeculationConfig, StepFacts, StepPlan
from moe_engine.types.step_settings import GraphSettings
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.eplb.expert_recording_model import ExpertRecordingModel
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.sampling.logits_passes import LogitsPasses
from moe_engine.worker.startup.graph_setup import capture_graphs
from moe_engine.worker.step_graphs import CaptureError, StepGraphs, StepOutputs
from moe_engine.worker.step_shape import StepShape
from tests.worker.repeated_calls import RepeatedCalls, ReplayableTorch


class Counting:
    """A model of one number per token; records the sizes of its runs."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []
        self.heads: list[tuple[int, ...]] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.batches.append(batch)
        return batch.input_ids[:, None].float()

    def logits(
        self, hidden: torch.Tensor, sizes: StepSizes | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if sizes is not None:
            self.heads.append(sizes.logits)
        logits = -((hidden + 1 - torch.arange(64)) ** 2)
        return logits if out is None else out.copy_(logits)


def _runner(
    settings: GraphSettings, num_groups: int = 1, group: int = 0, rows_at_once: int = 1 << 30
) -> tuple[ModelRunner, Counting, RepeatedCalls]:
    stream = DeviceStream("cpu")
    pool = KVPool(KVSpec.mla(1, 4, 4, torch.float32), 256, 1, stream)
    parallel = ParallelContext()
    if num_groups > 1:
        parallel = ParallelContext(Topology(tp_size=num_groups, attn_dp_size=num_groups), group, decode_tokens=64)
    model, attention, backend = Counting(), ReplayableTorch(StubAttention()), RepeatedCalls()
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
    graphs = runner.forward.graphs
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
    """Three, one and no decodes: all groups run four tokens each. Without the LM head in the graph, all groups run the
    head as often as the largest group."""
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
        assert batch.real is not None and batch.real.tolist() == [1] * len(new) + [0] * (4 - len(new))
        assert (batch.slots[len(new) :] == 0).all() and (batch.positions[len(new) :] == 0).all()
        assert model.heads == ([(4, 4, 4)] if rows_at_once > 4 else [(2, 1, 0), (1, 0, 0)])


@pytest.mark.parametrize(
    "other", [StepFacts(5, 1, prefills=True), StepFacts(6, 6, num_drafting=2, depth=2), StepFacts(9, 9)], ids=repr
)
def test_no_group_replays_when_another_cannot(other: StepFacts) -> None:
    facts = (StepFacts(2, 2), other)
    for group, plan in enumerate((_decodes(2), StepPlan(1))):
        runner, _, _ = _runner(GraphSettings((1, 2, 4), counts=(1, 3)), 2, group)
        graphs = runner.forward.graphs
        assert graphs is not None and graphs.shape_of(replace(plan, dp_facts=facts)) is None


def test_padding_has_no_data_of_larger_steps() -> None:
    runner, model, _ = _runner(GraphSettings((4,)))
    for count in (4, 1, 3, 2, 4):
        runner.execute(_decodes(count))
        batch = model.batches[-1]
        queries = batch.attention.decode
        assert queries is not None and batch.num_tokens == 4
        assert batch.positions.tolist() == [3] * count + [0] * (4 - count)
        assert batch.slots.tolist() == [9 + i for i in range(count)] + [0] * (4 - count)
        assert batch.real is not None and batch.real.tolist() == [1] * count + [0] * (4 - count)
        assert queries.context_lens == queries.context_lens_device.tolist() == [4] * count + [1] * (4 - count)
        assert queries.rows.tolist() == list(range(count)) + [0] * (4 - count)


@pytest.mark.parametrize("entered", [False, True])
def test_a_failed_copy_leaves_neutral_padding(entered: bool) -> None:
    """Padded tokens then write to slot 0, not to the slots of the failed step. entered: its tensors are the buffers
    already."""
    runner, model, _ = _runner(GraphSettings((4,)))
    runner.execute(_decodes(1))
    build = runner.forward.builder.build

    def broken(plan: StepPlan, static: Any) -> Any:
        batch = build(plan, static if entered else None)
        if entered:
            assert batch.slots.data_ptr() == static.slots.data_ptr()
            raise RuntimeError("behind the launch")
        return replace(batch, slots=torch.cat((batch.slots, batch.slots)))

    runner.forward.builder.build = broken  # type: ignore[method-assign]
    with pytest.raises(StepError):
        runner.execute(_decodes(4))
    runner.forward.builder.build = build  # type: ignore[method-assign]
    runner.execute(replace(_decodes(1), number=9))
    batch = model.batches[-1]
    assert batch.positions.tolist() == [3, 0, 0, 0] and batch.slots.tolist() == [9, 0, 0, 0]
    assert batch.real is not None and batch.real.tolist() == [1, 0, 0, 0]
    runner.execute(replace(_decodes(4), number=10))
    assert model.batches[-1].real.tolist() == [1] * 4  # type: ignore[union-attr]


def test_hidden_states_are_kept_for_those_that_read_them() -> None:
    """Of captured steps without logits always; logits may have the dtype of hidden states."""

    def outputs(hidden: bool) -> StepOutputs:
        made = StepOutputs(Counting(), 2, None, True, hidden)  # type: ignore[arg-type]
        for ids in (torch.arange(3), torch.tensor([5, 6])):  # the largest first, without logits
            made.run(SimpleNamespace(input_ids=ids, sizes=None))  # type: ignore[arg-type]
        return made

    for hidden in (False, True):
        made = outputs(hidden)
        states, logits = made.of(2, 2)
        assert states.tolist() == ([[5], [6]] if hidden else []) and logits is not None
        assert logits.dtype == states.dtype and logits.argmax(-1).tolist() == [6, 7]
        states, logits = made.of(3, 1)
        assert len(states) == 1 and logits is None


def test_recorded_passes_are_not_replayed() -> None:
    runner, model, backend = _runner(GraphSettings((4,)))
    recorder: Any = SimpleNamespace(wanted=True, counting=False, end_pass=lambda: None)
    runner.forward.model = ExpertRecordingModel(model, recorder)  # type: ignore[arg-type]
    assert not runner.execute(_decodes(2)).cuda_graph and model.batches[-1].num_tokens == 2
    recorder.wanted = False
    assert runner.execute(_decodes(2)).cuda_graph and backend.num_replays == 1


# -- launches without graphs


def test_devices_and_backends_without_graphs_stay_eager(caplog: pytest.LogCaptureFixture) -> None:
    runner = stub_runner(max_rows=4)
    assert capture_graphs(runner, GraphSettings((1, 2))) == 0 and runner.forward.graphs is None  # a CPU
    assert capture_graphs(runner, GraphSettings((1, 2)), backend=RepeatedCalls()) == 0 and runner.forward.graphs is None
    assert "the stub attention backend cannot be replayed" in caplog.text
    assert runner.forward.attention.capabilities.plan_in_place is None


def test_a_refused_capture_names_the_flag_that_helps() -> None:
    class Refusing:
        def capture(self, run: object) -> object:
            raise RuntimeError("operation not permitted when stream is capturing")

    runner = stub_runner(max_rows=4)
    runner.forward.attention = ReplayableTorch(runner.forward.attention)  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"2 requests cannot be captured.*--disable-cuda-graph"):
        capture_graphs(runner, GraphSettings((1, 2)), backend=Refusing())  # type: ignore[arg-type]


def test_the_largest_graph_is_captured_first(capsys: pytest.CaptureFixture[str]) -> None:
    class Ordered(RepeatedCalls):
        def capture(self, run: Any) -> Any:
            before = len(model.batches)
            run()
            order.append(model.batches[before].num_tokens)
            return super().capture(run)

    order: list[int] = []
    runner, model, _ = _runner(GraphSettings((1,)))
    assert capture_graphs(runner, GraphSettings((1, 3, 8), (1, 2)), progress=True, backend=Ordered()) == 6
    assert order == sorted(order, reverse=True) == [16, 8, 6, 3, 2, 1]
    assert "Capturing batches" in capsys.readouterr().err and isinstance(runner.forward.graphs, StepGraphs)
