"""The random checkpoints, the evaluation of results, and the plans of the one-batch driver."""

import json
import os
import random
import sys
from argparse import Namespace
from concurrent.futures import Future
from itertools import islice
from types import SimpleNamespace

import pytest
from safetensors import safe_open

from benchmarks import report, side_by_side, startup
from benchmarks.checkpoints import SHAPES, ensure_checkpoint, parse_overrides
from benchmarks.limits import MeasuredLimits
from benchmarks.peers import Run, agreement
from benchmarks.step_driver import BatchDriver
from benchmarks.step_work import ModelWork
from benchmarks.workloads import PEERS, WORKLOADS
from moe_engine.planning.step_limits import StepLimits
from moe_engine.tuning.datasets import Vocabulary
from moe_engine.types import StepPlan, StepResult


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory):
    return ensure_checkpoint("moe-tiny", tmp_path_factory.mktemp("checkpoints") / "moe", num_hidden_layers=2)


def tensors(path):
    index = json.loads((path / "model.safetensors.index.json").read_text())
    shapes = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(path / file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                assert index["weight_map"][name] == file
                shapes[name] = shard.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in shapes.values())
    return shapes


def test_checkpoint_has_hub_names_and_shapes(tiny_moe):
    found = tensors(tiny_moe)
    assert found["model.layers.1.mlp.experts.15.down_proj.weight"].shape == (256, 128)
    assert found["model.layers.1.mlp.shared_experts.up_proj.weight"].shape == (128, 256)
    assert found["model.layers.0.mlp.gate_proj.weight"].shape == (512, 256)
    assert found["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"].shape == (128 + 32, 256)
    bias = found["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert str(bias.dtype) == "torch.float32" and bias.abs().sum() > 0
    assert (found["model.norm.weight"] != 1).any()
    config = json.loads((tiny_moe / "config.json").read_text())
    work = ModelWork.from_config(config)
    experts = work.num_moe_layers * work.num_experts * work.expert_weights
    big = sum(t.numel() for name, t in found.items() if t.dim() == 2)
    assert big == work.layer_weights + experts + 2 * work.head_weights


def test_checkpoint_is_written_once_and_never_mixed_up(tiny_moe):
    before = (tiny_moe / "model.safetensors.index.json").stat().st_mtime_ns
    assert ensure_checkpoint("moe-tiny", tiny_moe, num_hidden_layers=2) == tiny_moe
    assert (tiny_moe / "model.safetensors.index.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="another checkpoint"):
        ensure_checkpoint("dense-tiny", tiny_moe)


def test_dense_checkpoint(tmp_path):
    found = tensors(ensure_checkpoint("dense-tiny", tmp_path / "dense"))
    assert found["model.layers.1.self_attn.k_proj.weight"].shape == (128, 256)
    assert not any("experts" in name for name in found)


def test_tokenizer_fills_the_vocabulary_and_round_trips(tiny_moe):
    vocabulary = Vocabulary.from_path(tiny_moe)
    assert len(vocabulary.plain_ids) == SHAPES["moe-tiny"]["vocab_size"] - 6
    text = "the noon sun is here: 17 + 25 = 42, naïve?"
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_overrides():
    assert parse_overrides(["num_hidden_layers=3", "model_type=x"]) == {"num_hidden_layers": 3, "model_type": "x"}
    with pytest.raises(ValueError):
        parse_overrides(["nothing"])


def test_workload_prompts():
    workload = WORKLOADS["W3"]
    prompts = workload.prompts(16384, seed=0)
    assert len(prompts) == 32 and {len(p) for p in prompts} == {544}
    assert len({tuple(p[:512]) for p in prompts}) == 1 and len({tuple(p) for p in prompts}) == 32
    assert workload.prompts(16384, seed=1)[0][:512] != prompts[0][:512]
    assert WORKLOADS["W4"].counted_tokens == 2048 and WORKLOADS["W2"].counted_tokens == 1024


def test_judging_a_workload():
    workload, work = WORKLOADS["W1"], ModelWork.from_config(SHAPES["moe-390m"])
    limits = [MeasuredLimits(15.0 * speed, "read", 1500.0, "gemm", {}) for speed in (2, 1, 1)]  # 162, 81, 81 tokens/s
    runs = {
        "engine": [Run(seconds, 0.1, [[1, 2, 3]]) for seconds in (2.0, 2.5, 4.0)],
        "transformers": [Run(10.0, 0.4, [[1, 2, 4]])],
        "by_hand": [],
    }
    result = side_by_side.workload_result(workload, runs, limits, work, PEERS["moe-390m"]["W1"])
    assert result["limit_tokens_per_second"] == pytest.approx(81, rel=0.01)
    assert result["engine"]["tokens_per_second"] == pytest.approx(128 / 2.5)
    assert result["engine"]["spread"] == pytest.approx(0.8)
    assert result["ratio"] == pytest.approx(10.0 / 2.0)  # of the round with both sides
    assert side_by_side.missed({"W1": result}) == ["W1: 39% of the limit"]
    each = [64 / 162, 51.2 / 81, 32 / 81]  # a fast round on a machine that was twice as fast is not a better round
    assert result["engine"]["fractions_of_limit"] == pytest.approx(each, rel=0.01)
    assert result["engine"]["fraction_of_limit"] == pytest.approx(32 / 81, rel=0.01)
    assert result["agreement"] == {"same_first_token": 1.0, "mean_common_tokens": 2.0}
    table = side_by_side.result_table({"W1": result})
    assert "63% llama.cpp" in table and "W1  1 x 128 in, 128 out" in table and "5.0x" in table
    slow = [MeasuredLimits(10.0, "read", 1500.0, "gemm", {})]  # 54 tokens/s
    result = side_by_side.workload_result(workload, {**runs, "engine": [Run(2.5, 0.1, [[9]])]}, slow, work, None)
    assert not side_by_side.missed({"W1": result}) and "llama.cpp" not in side_by_side.result_table({"W1": result})


def test_agreement():
    assert agreement([[1, 2], [3, 4]], [[1, 2], [5, 4]]) == {"same_first_token": 0.5, "mean_common_tokens": 1.0}


def test_startup_summary_leaves_the_first_run_out():
    def run(ready: float) -> dict:
        return {"ready_seconds": ready, "first_token_seconds": ready + 0.1, "parts_seconds": {}, "memory_bytes": 1}

    values = startup.summary([run(20.0), run(4.0), run(5.0)])
    assert values["ready_seconds"] == 4.5 and values["first_run_ready_seconds"] == 20.0 and values["passed"]
    assert not startup.summary([run(7.0)])["passed"]


class FakeWorker:
    """Answers every sampling request with its row number."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> Future:
        self.plans.append(plan)
        rows = [row for row, samples in zip(plan.rows, plan.samples) if samples]
        future: Future = Future()
        future.set_result(StepResult(plan.number, rows, [[row] for row in rows]))
        return future


@pytest.mark.parametrize(("chunk", "max_prefill"), [(8, 100), (100, 8), (-1, 8)])
def test_one_batch_plans(chunk, max_prefill):
    """No step has more prompt tokens than the scheduler's."""
    worker = FakeWorker()
    config = SimpleNamespace(
        page_size=4, max_running_requests=8, max_total_num_tokens=64, context_len=32, max_prefill_tokens=max_prefill,
        limits=StepLimits(chunk, max_prefill, running=8, context_len=32),
    )  # fmt: skip
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]
    driver = BatchDriver(worker, config, prompts, max_len=9)
    driver.prefill(until=2)
    driver.prefill()
    driver.decode()
    driver.decode()
    first, second, third, decode, last = worker.plans
    assert first.rows == [0, 1, 2] and first.counts == [2, 2, 2] and first.samples == [False] * 3
    assert [new.token_ids for new in first.new_rows] == prompts
    assert second.rows == [0, 1] and third.rows == [2] and second.counts == [3, 3] and third.counts == [3]
    assert decode.num_decodes == 3 and decode.starts == [5, 5, 5] and last.starts == [6, 6, 6]
    slots = [slot for plan in worker.plans for slot in plan.slots]
    assert len(set(slots)) == len(slots) == 3 * 7 and min(slots) == 4
    assert driver.tokens == [[0] * 3, [1] * 3, [2] * 3]
    with pytest.raises(ValueError, match="--max-total-tokens"):
        BatchDriver(worker, config, prompts, max_len=30)


def test_one_batch_divides_long_prompts():
    """A prompt longer than a step was one step, for which no memory is planned."""
    worker, size, length = FakeWorker(), random.randint(3, 9), random.randint(10, 40)
    config = SimpleNamespace(
        page_size=4, max_running_requests=8, max_total_num_tokens=400, context_len=64, max_prefill_tokens=99,
        limits=StepLimits(size, 99, running=8, context_len=64),
    )  # fmt: skip
    prompts = [[100 * row + i for i in range(count)] for row, count in enumerate((2, length, 1, length))]
    driver = BatchDriver(worker, config, prompts, max_len=length + 2)
    driver.prefill()
    computed, slots = [[] for _ in prompts], []
    for plan in worker.plans:
        assert sum(plan.counts) <= size and 0 not in plan.counts and len(set(plan.rows)) == len(plan.rows)
        assert [new.row for new in plan.new_rows] == [row for row in plan.rows if not computed[row]]
        assert plan.starts == [len(computed[row]) for row in plan.rows]
        tokens = iter(plan.input_ids)
        for row, count, samples in zip(plan.rows, plan.counts, plan.samples):
            computed[row] += islice(tokens, count)
            assert samples == (len(computed[row]) == len(prompts[row]))
        slots += plan.slots
    assert computed == prompts and driver.tokens == [[0], [1], [2], [3]]
    assert len(set(slots)) == len(slots) == sum(map(len, prompts))


@pytest.mark.parametrize(
    ("loads", "options", "ends"),
    [([0.2], {}, None), ([3.0, 1.0, 0.4], {}, None), ([2.0], {"busy": True}, None), ([9.0], {}, "--busy")],
    ids=["quiet", "soon quiet", "busy, as asked", "busy"],
)
def test_a_benchmark_waits_for_a_quiet_machine(monkeypatch, loads, options, ends):
    clock = iter(range(0, 10_000, 60))
    seen = iter(loads + [loads[-1]] * 20)
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    monkeypatch.setattr(report, "os", SimpleNamespace(**vars(os) | {"getloadavg": lambda: (next(seen), 0, 0)}))
    args = Namespace(**{"busy": False, "no_json": False, **options})
    if ends:
        with pytest.raises(SystemExit, match=ends):
            report.wait_until_quiet(args)
        return
    report.wait_until_quiet(args)
    assert report.machine()["load_1min_at_start"] == loads[-1]


@pytest.mark.parametrize(
    ("program", "module"), [("benchmarks/limits.py", "limits"), ("benchmarks/gpu_suite/__main__.py", "gpu_suite")]
)
def test_a_result_names_the_command_that_made_it(monkeypatch, tmp_path, program, module):
    monkeypatch.setattr(sys, "argv", [program, "--rounds", "2"])
    written = json.loads(report.write_result("alone", {}, folder=tmp_path).read_text())
    assert written["about"]["command"] == f"python -m benchmarks.{module} --rounds 2"


def test_result_files(tmp_path):
    path = report.write_result("demo", {"value": 1}, folder=tmp_path)
    assert path.name.endswith("_cpu_demo.json")
    written = json.loads(path.read_text())
    assert written["value"] == 1 and written["about"]["machine"]["cpu"] and "torch" in written["about"]["versions"]
    assert report.table(["a", "b"], [["x", 1], ["long", 22]]).split("\n") == [
        "a      b",
        "----  --",
        "x      1",
        "long  22",
    ]
