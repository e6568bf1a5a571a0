"""The model runner: results in the plan's order, named failures, isolated broken rows, Python overhead."""

from __future__ import annotations

import dataclasses
import random
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.stub_model import StubAttention, stub_runner
from moe_engine.errors import ConfigError, StepError, StepNotRun
from moe_engine.kernels import tables
from moe_engine.kernels.backends import plan_kernels
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.registry import Row
from moe_engine.models.batch import ForwardBatch
from moe_engine.types import LogprobSpec, NewRow, SamplingParams, StepPlan, StepResult
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.sampling.sampler import INVALID_TOKEN
from moe_engine.worker.startup import kernel_choice
from moe_engine.worker.worker import Worker
from tests.lines_run import lines_run
from tests.logprobs import unpack
from tests.worker.plan_driver import PlanDriver, Sequence_

VOCAB = 64
GREEDY = SamplingParams(temperature=0.0)


class NextToken:
    """Predicts token + 1; the token 13 gives NaN, the token 14 raises."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.calls += 1
        if (batch.input_ids == 14).any():
            raise RuntimeError("kernel launch failed")
        return batch.input_ids[:, None].float()

    def logits(self, hidden: torch.Tensor, sizes: object = None) -> torch.Tensor:
        logits = -((hidden + 1 - torch.arange(VOCAB)) ** 2)
        return logits.masked_fill(hidden == 13, torch.nan)


def _runner(max_rows: int = 8) -> ModelRunner:
    stream = DeviceStream("cpu")
    pool = KVPool(KVSpec.mla(1, 4, 4, torch.float32), 256, 1, stream)
    return ModelRunner(NextToken(), pool, RequestRows(max_rows, 100, VOCAB, stream), StubAttention(), stream)


def _new(row: int, tokens: list[int], sampling: SamplingParams = GREEDY, **fields: Any) -> NewRow:
    return NewRow(row, f"r{row}", tokens, len(tokens), [], sampling, row, frozenset(), **fields)


def _prompts(number: int, news: list[NewRow], samples: list[bool] | None = None) -> StepPlan:
    counts = [len(n.token_ids) for n in news]
    slots = list(range(1, sum(counts) + 1))
    ids = [t for n in news for t in n.token_ids]
    rows = [n.row for n in news]
    return StepPlan(number, rows, [0] * len(news), counts, samples or [True] * len(news), slots, 0, ids, news)


def _decodes(number: int, rows: list[int], starts: list[int]) -> StepPlan:
    count = len(rows)
    return StepPlan(number, rows, starts, [1] * count, [True] * count, list(range(100, 100 + count)), count)


def test_results_follow_the_plan() -> None:
    runner = _runner()
    result = runner.execute(_prompts(1, [_new(5, [1, 2]), _new(0, [20]), _new(3, [9, 30])], [True, False, True]))
    assert (result.number, result.rows, result.tokens) == (1, [5, 3], [[3], [31]])
    result = runner.execute(_decodes(2, [3, 5], [2, 2]))
    assert (result.rows, result.tokens, result.logprobs) == ([3, 5], [[32], [4]], None)


def test_empty_plans_only_update_rows() -> None:
    runner = _runner()
    result = runner.execute(StepPlan(7, new_rows=[_new(1, [5], LOGPROB_SAMPLING, logprobs=LogprobSpec(0))]))
    assert (result.number, result.rows, result.tokens) == (7, [], [])
    assert runner.rows.prompt_logprobs and runner.model.calls == 0
    runner.execute(StepPlan(8, finished_rows=[1]))
    assert not runner.rows.prompt_logprobs and not runner.rows.logprobs


LOGPROB_SAMPLING = SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias=((40, 1e4),))


def test_hidden_states_are_of_the_rows_own_tokens() -> None:
    """In batches that run short chunks after a cached prefix before other prompts."""
    runner = _runner()
    sequences = [Sequence_(random.choices(range(15, 40), k=random.randint(1, 12)), max_new=8) for _ in range(20)]
    orders = set()

    def execute(plan: StepPlan) -> StepResult:
        plan.new_rows[:] = [dataclasses.replace(new, returns_positions=new.row % 3 > 0) for new in plan.new_rows]
        result = runner.execute(plan)
        tokens = {s.row: s.tokens for s in sequences}
        spans = zip(plan.rows, plan.starts, plan.counts)
        expected = {row: tokens[row][start : start + count] for row, start, count in spans if row % 3}
        found = result.positions or {}
        assert {row: array("f", states.data).tolist() for row, states in found.items()} == expected
        assert all(states.num == len(expected[row]) for row, states in found.items())
        orders.add(tuple(np.diff(runner.forward.builder.build(plan).offsets) > 0) if plan.rows else ())
        return result

    PlanDriver(execute, runner.kv_pool, 8, random.randrange(1000), retract=0.2, repoint=0.2).run(sequences)
    assert any(not all(order) for order in orders), "no batch had another order than its plan"


def test_logprobs_are_of_the_raw_logits_and_only_on_request() -> None:
    runner = _runner()
    spec = LogprobSpec(None, 2, (3,))
    news = [_new(0, [1, 2]), _new(1, [8], LOGPROB_SAMPLING, logprobs=spec), _new(2, [13], logprobs=spec)]
    result = runner.execute(_prompts(1, news))
    assert result.tokens == [[3], [40], [INVALID_TOKEN]]
    assert result.logprobs is not None and result.logprobs[0] is None
    raw = torch.log_softmax(NextToken().logits(torch.tensor([[8.0]])), -1)[0]
    (entry,) = unpack(result.logprobs[1])
    assert entry.token_id == 40 and entry.logprob == pytest.approx(raw[40].item())
    assert entry.top[0][0] == 9 and entry.asked == (pytest.approx(raw[3].item()),)


def test_a_broken_row_fails_alone_and_stays_in_the_vocabulary() -> None:
    runner = _runner()
    result = runner.execute(_prompts(1, [_new(0, [4]), _new(1, [13]), _new(2, [6], SamplingParams(top_k=1))]))
    assert result.tokens == [[5], [INVALID_TOKEN], [7]]
    assert runner.execute(_decodes(2, [0, 1, 2], [1, 1, 1])).tokens == [[6], [1], [8]]


def test_a_failing_step_names_itself_and_the_next_one_runs() -> None:
    worker = Worker(_runner())
    failed = worker.execute(_prompts(41, [_new(0, [4]), _new(1, [1, 14])]))
    behind, good = worker.execute(_prompts(42, [_new(0, [4])])), worker.execute(_prompts(44, [_new(0, [4])]))
    with pytest.raises(StepError, match=r"step 41, running the model: 2 requests \(0 decodes\), 3 tokens: .*launch"):
        failed.result()
    with pytest.raises(StepNotRun, match="step 42 was planned behind step 41, which failed: it was not run"):
        behind.result()
    assert good.result().tokens == [[5]]
    bad_row = worker.execute(StepPlan(45, new_rows=[_new(99, [1])]))
    with pytest.raises(StepError, match=r"step 45, updating rows: .*row 99 is outside the worker's 8 rows"):
        bad_row.result()
    worker.close()


def test_sampled_requests_repeat_after_a_retraction() -> None:
    """The same request samples the same tokens, alone or with others, retracted midway or not."""
    never = ((13, -1e9), (14, -1e9))  # the tokens that break the model
    sampling = SamplingParams(temperature=30.0, top_p=0.95, frequency_penalty=0.5, logit_bias=never)
    new = _new(0, [10, 11], sampling)
    runner = _runner()
    tokens = runner.execute(_prompts(1, [new])).tokens[0]
    for i in range(6):
        tokens = tokens + runner.execute(_decodes(2 + i, [0], [2 + i])).tokens[0]
    other = _runner()
    known = [10, 11, *tokens[:3]]
    again = NewRow(6, "r", known, 2, [], sampling, 0, frozenset())
    assert other.execute(_prompts(1, [_new(1, [37, 38, 39], SamplingParams()), again])).tokens[1] == tokens[3:4]
    rest = [other.execute(_decodes(2 + i, [6, 1], [5 + i, 3 + i])).tokens[0][0] for i in range(3)]
    assert rest == tokens[4:]


# -- kernels that fail to load


class Broken:
    def __init__(self) -> None:
        raise OSError("libkernels.so: undefined symbol")


@dataclass
class Plain:
    name: str = "torch"


def _use(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Row("torch", f"{__name__}:Plain", 0, lambda device, need: None),
        Row("cpu", f"{__name__}:Broken", 10, lambda device, need: None),
    ]
    for family in tables.FAMILIES:
        monkeypatch.setitem(tables.FAMILIES, family, rows)


def test_auto_falls_back_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch)
    backends = kernel_choice.build_backends(plan_kernels(Device("cpu", "test"), Need("float32"), {"ops": "torch"}))
    assert isinstance(backends.linear, Plain) and isinstance(backends.attention, Plain)
    by_family = {choice.family: choice for choice in backends.choices}
    assert by_family["linear"].row.name == "torch"
    assert "undefined symbol" in by_family["linear"].refused["cpu"]
    assert by_family["ops"].reason == "named by its flag"


def test_refused_rows_are_logged_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without a compiler uses torch rows, with one log line. Rows for GPUs are not named on a CPU."""
    _use(monkeypatch)
    rows = tables.FAMILIES["ops"]  # shared by all families
    rows[1] = dataclasses.replace(rows[1], why_not=lambda device, need: "needs a compiler")
    rows.append(Row("gpu", f"{__name__}:Broken", 20, lambda device, need: f"the library {device.no_cuda}"))
    kernel_choice.build_backends(plan_kernels(Device("cpu", "test"), Need("float32"), {"ops": "torch"}))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "linear, experts, attention, sampling: using torch kernels, because cpu needs a compiler"


@pytest.mark.parametrize("asked", [{"experts": "cpu"}, {"experts": "nonsense"}])
def test_a_named_backend_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, asked: dict[str, str]) -> None:
    _use(monkeypatch)
    with pytest.raises((ConfigError, ValueError), match=asked["experts"]):
        kernel_choice.build_backends(plan_kernels(Device("cpu", "test"), Need("float32"), asked))


# -- time


class CountedOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def decode_cost(count: int) -> tuple[int, int]:
    """(torch operations, lines of Python) of a step of `count` decodes without a model."""
    runner = stub_runner(max_rows=count, vocab_size=32)
    rows = list(range(count))
    runner.execute(_prompts(0, [_new(i, [1]) for i in rows]))
    runner.execute(_decodes(1, rows, [1] * count))
    with CountedOperations() as operations:
        runner.execute(_decodes(2, rows, [2] * count))
    return operations.count, lines_run(lambda: runner.execute(_decodes(3, rows, [3] * count)))


def test_a_decode_step_runs_few_lines_and_no_operation_for_each_row() -> None:
    """`benchmarks/host_time.py` measures the time of a step."""
    few, many = decode_cost(8), decode_cost(256)
    assert many[0] == few[0]
    assert many[1] - few[1] <= 2 * (256 - 8)
