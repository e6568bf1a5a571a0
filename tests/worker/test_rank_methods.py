"""Methods of a rank: profiles, and weight updates that fail halfway. One worker in this process."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import MoeEngineError
from moe_engine.executor.make_worker import worker_options
from moe_engine.kernels import host_memory
from moe_engine.planning.prepare import prepare
from moe_engine.types import NewRow, SamplingParams, StepPlan
from moe_engine.worker import weight_update
from moe_engine.worker.worker import Worker
from tests.models.checkpoints import make_checkpoint

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return [make_checkpoint("deepseek_v3", folder / str(i), i, tokenizer=False) for i in range(2)]


@pytest.fixture
def worker(checkpoints: list[Path]) -> Iterator[Worker]:
    flags = {"dtype": "float32", "max_total_tokens": 256, "max_running_requests": 4, "cpu_threads": 1}
    made = Worker.create(worker_options(prepare(EngineArgs.from_kwargs(model_path=str(checkpoints[0]), **flags))))
    yield made
    made.close()


def step(worker: Worker, number: int) -> list[int]:
    """The token after the prompt."""
    new = NewRow(0, "r", PROMPT, 0, [], SamplingParams(temperature=0.0), 1, frozenset())
    slots = list(range(len(PROMPT)))
    plan = StepPlan(number, [0], [0], [len(PROMPT)], [True], slots, input_ids=PROMPT, new_rows=[new], finished_rows=[0])
    found: list[int] = worker.execute(plan).result().tokens[0]
    return found


def logits_of(worker: Worker) -> list[Any]:
    from moe_engine.models.footprint import weights_of

    return [tensor.clone() for tensor in weights_of(worker.runner.model.embedding)]  # type: ignore[attr-defined]


def ask(worker: Worker, method: str, **args: Any) -> Any:
    return worker.run_call(method, args).result()


def test_a_trace_has_the_steps_between_start_and_stop(worker: Worker, tmp_path: Path) -> None:
    step(worker, 1)
    plain = worker.runner.launch
    path = ask(worker, "start_profile", output_dir=str(tmp_path / "traces"), prefix="a")
    assert path == str(tmp_path / "traces" / "a-TP-0.trace.json.gz")
    step(worker, 2)
    step(worker, 3)
    with pytest.raises(MoeEngineError, match="in progress already"):
        ask(worker, "start_profile", output_dir=str(tmp_path), prefix="b")
    assert ask(worker, "stop_profile") == path
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    names = {event["name"] for event in events}
    assert {name for name in names if str(name).startswith("step ")} == {
        "step 2: 1 requests, 4 tokens",
        "step 3: 1 requests, 4 tokens",
    }
    assert worker.runner.launch == plain, "no overhead without a trace"
    assert ask(worker, "stop_profile") is None


def test_a_trace_of_some_steps_ends_alone(worker: Worker, tmp_path: Path) -> None:
    path = Path(ask(worker, "start_profile", output_dir=str(tmp_path), prefix="a", num_steps=2))
    step(worker, 1)
    assert not path.read_bytes()
    step(worker, 2)
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert ask(worker, "stop_profile") is None
    with pytest.raises(MoeEngineError, match="cannot be written"):
        ask(worker, "start_profile", output_dir=str(path), prefix="a")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_trace_on_a_full_disk(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "a-TP-0.trace.json.gz").symlink_to("/dev/full")
    ask(worker, "start_profile", output_dir=str(tmp_path), prefix="a")
    step(worker, 1)
    with pytest.raises(MoeEngineError, match=r"a-TP-0.trace.json.gz: cannot be written \(.*No space left"):
        ask(worker, "stop_profile")
    assert not list(tmp_path.iterdir())
    step(worker, 2)


def test_a_failure_while_staging_changes_nothing(
    worker: Worker, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, token = logits_of(worker), step(worker, 1)
    real = weight_update.reload

    def failing(*args: Any) -> Iterator[Any]:
        for number, pair in enumerate(real(*args)):
            if number == 3:
                raise OSError("Input/output error")
            yield pair

    with monkeypatch.context() as broken:
        broken.setattr(weight_update, "reload", failing)
        with pytest.raises(OSError, match="Input/output"):
            ask(worker, "stage_weights", model_path=str(checkpoints[1]))
    with pytest.raises(MoeEngineError, match="no weights are staged"):
        ask(worker, "commit_weights")
    ask(worker, "stage_weights", model_path=str(checkpoints[1]))
    assert step(worker, 2) == token, "staged weights are not in force"
    ask(worker, "discard_weights")
    with pytest.raises(MoeEngineError, match="no weights are staged"):
        ask(worker, "commit_weights")
    assert all((a == b).all() for a, b in zip(before, logits_of(worker)))


def test_weights_keep_their_addresses(worker: Worker, checkpoints: list[Path]) -> None:
    """CUDA graphs and whole-layer calls contain the addresses."""
    from moe_engine.models.footprint import weights_of

    model: Any = worker.runner.model
    parts = [model.embedding, model.head, *(layer.feed_forward for layer in model.layers)]
    before = [tensor.data_ptr() for part in parts for tensor in weights_of(part)]
    values = logits_of(worker)
    ask(worker, "stage_weights", model_path=str(checkpoints[1]))
    ask(worker, "commit_weights")
    assert [tensor.data_ptr() for part in parts for tensor in weights_of(part)] == before
    assert any((a != b).any() for a, b in zip(values, logits_of(worker)))


@pytest.mark.parametrize(
    "names", [("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")]
)
def test_the_check_counts_a_containers_limit(
    worker: Worker, checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    for name, size in zip(names, (3 << 20, 1 << 20)):
        (tmp_path / name).write_text(f"{size}\n")
    monkeypatch.setattr(host_memory, "own_cgroup", lambda: tmp_path)
    found = ask(worker, "check_weights", model_path=str(checkpoints[1]))
    assert found["available"] == 2 << 20
    assert worker.runner.stream.free_bytes() == 2 << 20


def test_unknown_methods_and_arguments_are_refused_by_name(worker: Worker) -> None:
    for method, args in (("close", {}), ("stage_weights", {"path": "/x"}), ("stop_profile", {"x": 1})):
        with pytest.raises(MoeEngineError, match=method):
            ask(worker, method, **args)
