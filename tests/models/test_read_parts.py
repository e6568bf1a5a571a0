"""Parts of tensors read on several threads: order, bounded buffers, errors; files read so hold the same values."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_engine.errors import CheckpointError
from moe_engine.models.checkpoint import safetensors_file
from moe_engine.models.checkpoint.load_threads import for_each
from moe_engine.models.checkpoint.read_parts import PartReads
from moe_engine.models.checkpoint.safetensors_file import SafetensorsFile
from moe_engine.models.checkpoint_files import read_checkpoint
from tests.models import stepper
from tests.models.checkpoints import make_checkpoint
from tests.waiting import until


@pytest.fixture
def reads() -> Iterator[PartReads]:
    reads = PartReads(3)
    yield reads
    reads.close()


def test_results_come_in_order_from_bounded_buffers(reads: PartReads) -> None:
    lock, held, most, names = threading.Lock(), 0, 0, set()

    def read(number: int) -> int:
        nonlocal held, most
        with lock:
            held, most = held + 1, max(most, held + 1)
            names.add(threading.current_thread().name)
        return number

    count = random.randrange(10, 60)
    for place, number in enumerate(reads.in_order([partial(read, i) for i in range(count)])):
        assert number == place
        with lock:
            held -= 1
    assert most <= 3 + 1 and all(name.startswith("read") for name in names)
    reads.close()
    assert list(reads.in_order([lambda: 7])) == [7], "new threads after the end"


def test_all_reads_have_ended_when_one_fails(reads: PartReads) -> None:
    """No thread writes to memory that the caller frees after an error."""
    running, gate = set[int](), threading.Event()

    def read(number: int) -> None:
        if number == 0:
            raise CheckpointError("part 0")
        running.add(number)
        gate.wait(60)
        running.discard(number)

    for run in (reads.all, lambda parts: list(reads.in_order(parts))):
        gate.clear()
        timer = threading.Timer(0.05, gate.set)
        timer.start()
        with pytest.raises(CheckpointError, match="part 0"):
            run([partial(read, i) for i in range(20)])  # type: ignore[operator]
        assert not running
        timer.join()


def test_threads_that_load_whole_weights_read_serially(reads: PartReads) -> None:
    names: set[str] = set()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        note = [lambda: names.add(threading.current_thread().name)] * 4
        for_each(2, lambda: None, lambda i, state: reads.all(note))
    finally:
        torch.set_num_threads(threads)
    assert names and all(name.startswith("load") for name in names)


def test_files_hold_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: PartReads) -> None:
    """Direct reads and converting ones, of whole tensors and of slices; a file that ends early has its one error."""
    for name in ("PART_BYTES", "DIRECT_BYTES"):
        monkeypatch.setattr(safetensors_file, name, 1 << 10)
    tensors = {"a": torch.randn(random.randrange(40, 90), 70).bfloat16(), "b": torch.randn(900), "c": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    (file,) = {found.path: found for found in read_checkpoint(tmp_path).values()}.values()
    opened, serial = SafetensorsFile(file, reads), SafetensorsFile(file)
    for name, tensor in tensors.items():
        assert torch.equal(opened.read(name), tensor) and torch.equal(serial.read(name), tensor)
        wide = torch.empty(tensor.shape, dtype=torch.float64)
        opened.read_into(name, safetensors_file.UNCUT, wide)
        assert torch.equal(wide, tensor.double())
    size = (tmp_path / "model.safetensors").stat().st_size
    with (tmp_path / "model.safetensors").open("r+b") as written:
        written.truncate(size - 1500)
    last, errors = max(file.tensors, key=lambda name: file.tensors[name].stop), []
    for one in (opened, serial):
        with pytest.raises(CheckpointError) as caught:
            one.read(last)
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and "\n" not in errors[0]
    assert f"truncated while it was read: tensor {last}" in errors[0]


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama"])
def test_a_model_loaded_in_parts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(kind, tmp_path, dtype="bfloat16", tokenizer=False)
    step = [stepper.Chunk(0, list(range(30, 60)), False)]
    want = stepper.load(path, "cpu").step(step)[0]
    for name in ("PART_BYTES", "DIRECT_BYTES"):
        monkeypatch.setattr(safetensors_file, name, 1 << 10)
    threads, others = torch.get_num_threads(), set(threading.enumerate())
    torch.set_num_threads(3)
    try:
        found = stepper.load(path, "cpu").step(step)[0]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found, want)
    until(lambda: not any(thread.name.startswith("read_") for thread in {*threading.enumerate()} - others))
