"""Recording in a worker of one rank, in every mode and on both paths through a layer, compared with the router's
output."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_engine.config.args import EngineArgs
from moe_engine.core.core_methods import ExpertDumps
from moe_engine.errors import MoeEngineError
from moe_engine.executor.make_worker import worker_options
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.planning.prepare import prepare
from moe_engine.types import NewRow, SamplingParams, StepPlan
from moe_engine.worker.eplb.expert_recording_model import ExpertRecordingModel
from moe_engine.worker.startup.expert_setup import moe_layers
from moe_engine.worker.worker import Worker
from tests.models.checkpoints import make_checkpoint

EXPERTS, TOP_K = 16, 3
PROMPTS = [7, 4, 9]
Choices = list[dict[int, Tensor]]  # of each pass, by layer [T, K]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        "deepseek_v3", tmp_path_factory.mktemp("recorded"), 8, tokenizer=False, num_mtp_layers=1,
        n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, n_group=4, topk_group=2,
    )  # fmt: skip


def make_worker(path: Path, folder: Path, row: str, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> Worker:
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(folder))
    rows = {f"{family}_backend": row for family in ("attention", "moe_runner", "linear", "ops")}
    args = {"model_path": str(path), "dtype": "float32", "max_total_tokens": 512, "skip_tokenizer_init": True}
    return Worker.create(worker_options(prepare(EngineArgs.from_kwargs(**{**args, **rows, **flags}))))


def plans(prompts: list[int], decodes: int) -> list[StepPlan]:
    """A prefill of random prompts, then decodes."""
    rng = torch.Generator().manual_seed(3)
    count, start = len(prompts), list(np.cumsum([0, *prompts]) * 3 + 1)
    ids = [torch.randint(0, 300, (length,), generator=rng).tolist() for length in prompts]
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    new = [NewRow(i, f"r{i}", ids[i], prompts[i], [], greedy, 0, frozenset()) for i in range(count)]
    slots = [start[i] + j for i in range(count) for j in range(prompts[i])]
    rows, ones = list(range(count)), [1] * count
    flat = [token for row in ids for token in row]
    made = [StepPlan(0, rows, [0] * count, prompts, [True] * count, slots, input_ids=flat, new_rows=new)]
    for step in range(decodes):
        starts = [length + step for length in prompts]
        slots = [int(start[i]) + starts[i] for i in range(count)]
        made.append(StepPlan(step + 1, rows, starts, ones, [True] * count, slots, num_decodes=count))
    return made


def run(worker: Worker, steps: list[StepPlan]) -> list[list[list[int]]]:
    return [worker.execute(step).result().tokens for step in steps]


def spy_on_routers(worker: Worker, seen: Choices) -> None:
    """Records each layer's router output in its own call, independent of the recorder."""
    worker.runner.fused = worker.runner.model.stack = None  # type: ignore[attr-defined]
    layers = moe_layers(worker.runner.model)
    first = min(layers)
    for index, layer in layers.items():

        def forward(
            x: Tensor, phase: Any = "prefill", tokens: Any = None, index: int = index, layer: MoE = layer
        ) -> Tensor:
            if index == first:
                seen.append({})
            chosen = layer._route(x, layer._gate, layer._bias, layer._spec)[1]
            seen[-1][index] = chosen[:, : layer._spec.top_k].clone()
            return MoE.forward(layer, x, phase, tokens)

        layer.forward = forward  # type: ignore[method-assign]


def dump(worker: Worker, folder: Path) -> dict[str, Any]:
    taken = worker.run_call("dump_experts").result()
    (path,) = ExpertDumps(folder).method().call({"parts": [taken]}).result()
    assert Path(path).parent == folder
    return torch.load(path, weights_only=True)


def counted(choices: dict[int, Tensor], num_layers: int) -> np.ndarray:
    counts = np.zeros((num_layers, EXPERTS), dtype=np.int64)
    for layer, ids in choices.items():
        for expert, count in Counter(ids.flatten().tolist()).items():
            counts[layer, expert] = count
    return counts


@pytest.mark.parametrize("row", ["torch", "cpu"])
@pytest.mark.parametrize("mode", ["stat", "stat_approx", "per_pass", "per_token"])
@pytest.mark.each_value
def test_a_worker_records_what_its_routers_choose(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, row: str
) -> None:
    flags = {"expert_distribution_recorder_buffer_size": 8, "expert_distribution_recorder_mode": mode}
    worker, twin = (make_worker(checkpoint, tmp_path, row, monkeypatch, **flags) for _ in range(2))
    num_layers = worker.runner.model.config.num_layers  # type: ignore[attr-defined]
    layers = moe_layers(worker.runner.model)
    assert all((layer.fused is not None) == (row == "cpu") for layer in layers.values())
    steps = plans(PROMPTS, 3)
    seen: Choices = []
    spy_on_routers(twin, seen)
    before = run(twin, steps)
    twin.close()
    assert worker.run_call("start_experts").result() is True
    assert run(worker, steps) == before, "recording changes no token"
    worker.run_call("stop_experts").result()
    run(worker, [StepPlan(9, finished_rows=[0, 1, 2]), steps[0]])
    view = worker.run_call("view_experts").result()
    expected = [counted(choices, num_layers) for choices in seen[: len(steps)]]
    assert view["counts"] == sum(expected).tolist() and not view["recording"]
    content = dump(worker, tmp_path)
    if mode.startswith("stat"):
        counts = content["logical_count"]
        assert counts.shape == (8, num_layers, EXPERTS) and counts.dtype == torch.int32
        assert counts[: len(steps)].tolist() == np.stack(expected).tolist() and not counts[len(steps) :].any()
    else:
        records = content["records"]
        assert [record["global_physical_count"].tolist() for record in records] == [e.tolist() for e in expected]
        assert [record["rank"] for record in records] == [0] * len(steps)
        numbers = [record["forward_pass_id"] for record in records]
        assert numbers == list(range(numbers[0], numbers[0] + len(steps)))
    if mode == "per_token":
        prefill, decode = records[0], records[1]
        assert (prefill["forward_mode"], decode["forward_mode"]) == (1, 2)
        assert prefill["extend_seq_lens"] == PROMPTS and decode["extend_seq_lens"] is None
        assert prefill["input_ids"] == steps[0].input_ids and len(decode["input_ids"]) == len(PROMPTS)
        for layer, ids in seen[0].items():
            assert torch.equal(prefill["topk_ids_of_layer"][layer, :, :TOP_K], ids)
    worker.close()


def test_drafts_are_not_recorded_and_change_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with an MTP drafter and redundant experts: only the target's passes count."""
    flags = {"expert_distribution_recorder_mode": "stat", "ep_num_redundant_experts": 3}
    worker = make_worker(checkpoint, tmp_path, "cpu", monkeypatch, speculative_algorithm="NEXTN", **flags)
    worker.run_call("start_experts").result()
    assert isinstance(worker.runner.model, ExpertRecordingModel)
    run(worker, plans(PROMPTS, 2))
    counts = dump(worker, tmp_path)["logical_count"]
    num_layers = worker.runner.model.model.config.num_layers  # type: ignore[attr-defined]
    moe = moe_layers(worker.runner.model.model)  # type: ignore[attr-defined]
    assert counts.shape[1:] == (num_layers, EXPERTS)
    assert counts.sum((1, 2))[:4].tolist() == [sum(PROMPTS) * TOP_K * len(moe), *[3 * TOP_K * len(moe)] * 2, 0]
    worker.close()


Attached = tuple[Any, list[Any], bool]


def attached(worker: Worker) -> Attached:
    """The recording objects of a step: the model, each layer's recorder and counter, the stack's recording."""
    model: Any = worker.runner.model
    decoder = model.model if isinstance(model, ExpertRecordingModel) else model
    layers = [(moe._recorder, moe._counted_at, moe._routed.__dict__.get("on_arrival")) for moe in decoder.moes]
    return type(model), layers, decoder.stack is not None and decoder.stack.records_experts


def calls_of_a_step(worker: Worker, step: StepPlan) -> Counter[Any]:
    """Python functions that the step thread calls, by code; C functions by name."""
    seen: Counter[Any] = Counter()

    def note(frame: Any, event: str, function: Any) -> None:
        if event == "call":
            seen[frame.f_code] += 1
        elif event == "c_call":
            seen[function.__qualname__] += 1

    def step_watched() -> None:
        sys.setprofile(note)
        try:
            worker.runner.execute(step)
        finally:
            sys.setprofile(None)

    worker.call(step_watched).result()
    return seen


@pytest.mark.parametrize("row", ["torch", "cpu"])
@pytest.mark.parametrize("mode", ["stat", "stat_approx", "per_pass", "per_token"])
@pytest.mark.each_value
def test_stopped_recording_has_no_overhead(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, row: str
) -> None:
    plain = make_worker(checkpoint, tmp_path, row, monkeypatch)
    worker = make_worker(checkpoint, tmp_path, row, monkeypatch, expert_distribution_recorder_mode=mode)
    steps = plans(PROMPTS, 3)
    nothing = attached(plain)
    assert attached(worker) == nothing
    for each in (plain, worker):
        run(each, steps[:2])
    want = calls_of_a_step(plain, steps[2])
    assert calls_of_a_step(worker, steps[2]) == want, "before the first start"
    worker.run_call("start_experts").result()
    assert attached(worker) != nothing
    run(worker, steps[3:])
    worker.run_call("stop_experts").result()
    assert attached(worker) == nothing
    run(worker, [StepPlan(9, finished_rows=[0, 1, 2]), *steps[:2]])
    assert calls_of_a_step(worker, steps[2]) == want, "after the stop"
    for each in (plain, worker):
        each.close()


@pytest.mark.parametrize("mode", ["stat", "per_pass"])
def test_what_recording_costs_a_fused_step_does_not_grow_with_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    more = []
    for num_layers in (3, 6):
        path = make_checkpoint(
            "deepseek_v3", tmp_path / str(num_layers), 8, tokenizer=False, num_hidden_layers=num_layers
        )
        worker = make_worker(path, tmp_path, "cpu", monkeypatch, expert_distribution_recorder_mode=mode)
        steps = plans(PROMPTS, 4)
        run(worker, steps[:2])
        off = calls_of_a_step(worker, steps[2])
        worker.run_call("start_experts").result()
        run(worker, steps[3:4])
        more.append((calls_of_a_step(worker, steps[4]) - off).total())
        worker.close()
    assert 0 < more[0] == more[1] < 60, "nothing is called for a layer"


def test_the_layer_of_a_pass_is_visible_through_the_recorder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the log line of a late rank."""
    worker = make_worker(checkpoint, tmp_path, "torch", monkeypatch, expert_distribution_recorder_mode="stat")
    worker.run_call("start_experts").result()
    phases = []
    decoder = worker.runner.model.model  # type: ignore[attr-defined]

    def noting(call: Any) -> Any:
        def forward(*args: Any, **more: Any) -> Tensor:
            phases.append(worker.runner.phase)
            return call(*args, **more)

        return forward

    decoder._calls = [noting(call) for call in decoder._calls]
    run(worker, plans(PROMPTS, 0))
    assert phases == [f"running the model, layer {i}" for i in range(len(decoder.layers))]
    worker.close()


def test_without_the_flag_nothing_is_attached(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(checkpoint, tmp_path, "torch", monkeypatch)
    assert not isinstance(worker.runner.model, ExpertRecordingModel)
    answers = [worker.run_call(f"{verb}_experts").result() for verb in ("start", "stop", "dump", "view")]
    assert answers == [False, False, None, None]
    for method, args in (("flush_cache", {}), ("start_experts", {"path": "/etc/passwd"})):
        with pytest.raises(MoeEngineError, match=method):
            worker.run_call(method, args).result()
    worker.close()
