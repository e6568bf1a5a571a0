"""Warm-up before READY, so that nothing compiles afterwards, and the detection of late compilations."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.stub_model import StubModel, stub_runner
from moe_engine.core.step_reporter import StepReporter
from moe_engine.frontend.client_api import EngineInfo
from moe_engine.kernels.triton import guard
from moe_engine.kernels.vendors.warming import StepShapes
from moe_engine.kernels.warmup_sizes import PREFIX, ladder
from moe_engine.scheduler.events import PlanFacts
from moe_engine.server.metrics import Metrics
from moe_engine.types import StepPlan, StepResult
from moe_engine.worker.device_stream import make_graphs
from moe_engine.worker.startup.warmup import compile_kernels, warm_sizes
from moe_engine.worker.worker import Worker
from tests.engine.harness import InProcessEngine, Scripted
from tests.speculation.agreeing import agreeing_checkpoint


class Compiling:
    """A kernel that compiles at first use."""

    def __init__(self) -> None:
        self.asked: list[StepShapes] = []
        self.capabilities = SimpleNamespace(warm_up=self.warm_up)

    def warm_up(self, shapes: StepShapes) -> int:
        self.asked.append(shapes)
        return 3


def test_every_kernel_that_compiles_is_warmed_up() -> None:
    linear, experts = Compiling(), Compiling()
    backends: Any = SimpleNamespace(linear=linear, experts=experts)
    shapes = StepShapes(64, 512, 128)
    assert compile_kernels(backends, shapes) == 6
    assert linear.asked == experts.asked == [shapes]


@pytest.mark.parametrize(("context_len", "largest"), [(64, 40), (2000, 300), (16, 100)])
def test_steps_of_every_size_class_run_and_restore_all_state(context_len: int, largest: int) -> None:
    runner = stub_runner(max_rows=11, context_len=context_len)
    runner.forward.model = StubModel(1024, 11, largest)
    plans: list[StepPlan] = []
    execute = runner.execute

    def watch(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return execute(plan)

    runner.execute = watch  # type: ignore[method-assign]
    assert warm_sizes(runner, largest) == len(plans) - 1
    prompts = [plan for plan in plans if plan.rows and not plan.num_decodes]
    fresh, behind = ({p.num_tokens for p in prompts if bool(p.starts[0]) == cached} for cached in (False, True))
    assert fresh >= set(ladder(largest)) and max(fresh) == largest
    assert behind == {size for size in ladder(largest) if size < context_len - 1}
    assert {max(p.starts) for p in prompts} <= set(range(PREFIX + 1))
    decodes = [plan for plan in plans if plan.num_decodes]
    assert sorted(p.num_decodes for p in decodes) == sorted(2 * ladder(11))
    assert all(set(plan.slots) <= {0} for plan in plans)
    assert {row for plan in plans for row in plan.finished_rows} == set(range(11))
    assert not runner.rows.last_token.any()


def test_contexts_beyond_the_top_k_run() -> None:
    """With steps much smaller than the top-k of sparse attention."""
    runner = stub_runner(max_rows=2, context_len=3000)
    runner.forward.model, starts = StubModel(1024, 2, 8), []
    execute = runner.execute
    runner.execute = lambda plan: (starts.extend(plan.starts), execute(plan))[1]  # type: ignore[method-assign]
    warm_sizes(runner, 8, 2048)
    assert set(starts) >= {0, PREFIX, 2048} and starts.count(2048) == len(ladder(8))


def test_a_real_engine_answers_as_before_it(tmp_path: Path) -> None:
    """With speculation: draft extends of prompts of every size, whose state is dropped."""
    path = agreeing_checkpoint("deepseek_v3", tmp_path / "model", 4, num_mtp_layers=1)
    flags = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 1, "speculative_num_draft_tokens": 2}
    engine = InProcessEngine(
        path, tmp_path / "board", dtype="float32", cpu_threads=1, max_total_tokens=512, max_running_requests=4,
        context_length=48, speculative_eagle_topk=1, **flags,
    )  # fmt: skip
    script = [Scripted(f"r{i}", list(range(3 + i, 12 + 2 * i)), 6, arrives=i) for i in range(3)]
    try:
        expected = {rid: answer.token_ids for rid, answer in engine.run(script).items()}
        slots = [engine.worker.runner.kv_pool.page_size, None]
        before = [[part[slice(*slots)].clone() for part in layer] for layer in engine.worker.runner.kv_pool.layers]
        assert warm_sizes(engine.worker.runner, 70) > 20
        for layer, kept in zip(engine.worker.runner.kv_pool.layers, before):
            assert all(torch.equal(part[slice(*slots)], old) for part, old in zip(layer, kept))
        assert {rid: answer.token_ids for rid, answer in engine.run(script).items()} == expected
    finally:
        engine.close()


def test_late_compilations_reach_the_state() -> None:
    worker = Worker(stub_runner())
    guard.reset()
    try:
        guard.ready()
        assert worker.state()["compilations_after_ready"] == 0
        guard.note("a_kernel", 0.5, False)
        assert worker.state()["compilations_after_ready"] == 1
    finally:
        guard.reset()
        worker.close()


def test_the_log_line_shows_whether_the_step_was_replayed(caplog: pytest.LogCaptureFixture) -> None:
    reporter = StepReporter(decode_log_interval=1)
    facts = PlanFacts(1, 0, 0, 0, 2, 2, 0, 9, 0.5)
    for replayed in (True, False):
        scheduler: Any = SimpleNamespace(last_facts=facts)
        reporter.planned(scheduler)
        with caplog.at_level(logging.INFO, "moe_engine"):
            reporter.finished(StepResult(1, [0, 1], [[3], [4]], cuda_graph=replayed))
        assert f"cuda graph: {replayed}, " in caplog.messages[-1]
        assert reporter.state()["is_cuda_graph"] == replayed


def test_gauges_sum_over_schedulers() -> None:
    health = SimpleNamespace(alive=True, num_running=1, num_waiting=0, num_used_tokens=5)
    client: Any = SimpleNamespace(health=lambda: health, healths=lambda: [health, health])
    info: Any = SimpleNamespace(
        max_total_num_tokens=10,
        max_running_requests=4,
        page_size=1,
        context_len=9,
        weight_bytes=0,
        kv_bytes=0,
        model_type="m",
        dtype="float32",
    )
    assert set(vars(info)) <= set(EngineInfo.__dataclass_fields__)
    states = [{"is_cuda_graph": 1, "compilations_after_ready": 2}, {"is_cuda_graph": 0, "compilations_after_ready": 1}]
    page = Metrics("m", info, "1.0").render(client, states).decode()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in page.splitlines() if line[0] != "#"}
    assert values["sglang:num_alive_schedulers"] == 2
    assert values["sglang:is_cuda_graph"] == 1 and values["sglang:compilations_after_ready"] == 3


# -- on a GPU


@pytest.mark.gpu
def test_a_cuda_graph_reads_what_its_inputs_hold_now() -> None:
    device = torch.device("cuda", 0)
    graphs = make_graphs(device)
    assert graphs is not None
    x, out = torch.zeros(4, device=device), torch.zeros(4, device=device)

    def double() -> None:
        out.copy_(x * 2)

    double()
    recording = graphs.capture(double)
    for value in (3.0, 5.0):
        x.fill_(value)
        recording.replay()
        assert out.tolist() == [2 * value] * 4


@pytest.mark.gpu
def test_replayed_tokens_are_those_without_graphs(tmp_path: Path) -> None:
    path = agreeing_checkpoint("deepseek_v3", tmp_path / "model", 5)
    script = [Scripted(f"r{i}", list(range(5 + i, 12 + 2 * i)), 5, arrives=i) for i in range(4)]
    small = {"max_total_tokens": 256, "context_length": 40, "max_running_requests": 3, "chunked_prefill_size": 16}
    answers = []
    for flags in ({"disable_cuda_graph": True}, {"cuda_graph_max_bs": 3}):
        engine = InProcessEngine(path, tmp_path / "board", device="cuda", **small, **flags)
        try:
            answers.append({rid: answer.token_ids for rid, answer in engine.run(script).items()})
            assert bool(engine.worker.info.num_graphs) == ("cuda_graph_max_bs" in flags)
        finally:
            engine.close()
    assert answers[0] == answers[1]
