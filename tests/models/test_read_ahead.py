"""Files are asked for in the order of layers, in a window ahead of the loader; the thread ends with the load."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.errors import CheckpointError
from moe_engine.models import read_ahead, weights
from moe_engine.models.checkpoint.tensor_header import TensorHeader
from moe_engine.models.config_file import load_model_config
from moe_engine.models.footprint import weights_of
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.read_ahead import Prefetch, ReadAhead, Span, drop_cache, spans
from moe_engine.models.weights import WeightReader
from tests.models.checkpoints import make_checkpoint
from tests.models.stepper import make_backends

MIB = 1 << 20


def headers(*places: tuple[str, int, int]) -> dict[str, TensorHeader]:
    return {name: TensorHeader("BF16", (), start, stop) for name, start, stop in places}


def test_spans_follow_the_layers_and_join_neighbors() -> None:
    one = SimpleNamespace(
        path=Path("1"),
        entries=headers(
            ("model.layers.10.a", 8, 20), ("model.layers.2.a", 20, 30), ("model.layers.2.b", 30, 44), ("unread", 44, 50)
        ),
    )  # fmt: skip
    two = SimpleNamespace(
        path=Path("2"), entries=headers(("lm_head.weight", 0, 8), ("model.embed_tokens.weight", 8, 16))
    )
    files: dict[str, Any] = dict.fromkeys(one.entries, one) | dict.fromkeys(two.entries, two)
    assert spans(files, files.keys() - {"unread"}) == [
        Span(Path("2"), 8, 16), Span(Path("1"), 20, 44), Span(Path("1"), 8, 20), Span(Path("2"), 0, 8),
    ]  # fmt: skip


class Read(list[tuple[str, int, int]]):
    """(file, start, size) of the threads' reads, which change nothing."""

    changed = threading.Condition()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._read = os.preadv
        monkeypatch.setattr(os, "preadv", self._note)

    def _note(self, file: int, buffers: list[memoryview], start: int) -> int:
        if not threading.current_thread().name.startswith("read-ahead"):
            return self._read(file, buffers, start)
        with self.changed:
            self.append((os.readlink(f"/proc/self/fd/{file}"), start, len(buffers[0])))
            self.changed.notify()
        return len(buffers[0])

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self) >= count, 60)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    return Read(monkeypatch)


def ended(ahead: ReadAhead) -> None:
    assert ahead.work
    for thread in ahead.work:
        thread.result(60)


def test_files_after_a_missing_one_are_read(tmp_path: Path, read: Read) -> None:
    intact = tmp_path / "x"
    intact.write_bytes(b"")
    ended(ReadAhead([Span(tmp_path / "gone", 0, 20 * MIB), Span(intact, 0, MIB)], Prefetch()))
    assert read == [(str(intact), 0, MIB)]


def test_a_missing_file_and_an_early_end_end_the_thread(tmp_path: Path, read: Read) -> None:
    gone = ReadAhead([Span(tmp_path / "gone", 0, MIB)], Prefetch())
    ended(gone)
    file = tmp_path / "x"
    file.write_bytes(b"")
    waiting = ReadAhead([Span(file, 0, 1 << 40)], Prefetch(), window=1)
    read.wait(1)
    waiting.close()
    ended(waiting)
    assert sum(size for _, _, size in read) <= read_ahead.PART_BYTES


def test_a_load_reads_ahead_what_it_needs(tmp_path: Path, read: Read) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1, tokenizer=False)
    reader = WeightReader(path, torch.float32, prefetch=Prefetch(), ignore=lambda names: {"lm_head.weight"})
    entries = next(iter(reader._files.values())).entries
    total = sum(header.num_bytes for name, header in entries.items() if name != "lm_head.weight")
    ahead: Any = reader._ahead
    ended(ahead)
    assert sum(size for _, _, size in read) == total
    for name, header in entries.items():
        reader.tensor(name, header.shape)
    assert ahead._taken == total
    reader.finish()


def test_a_failed_load_ends_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1, tokenizer=False)
    made: list[ReadAhead] = []

    def make(wanted: list[Span], prefetch: Prefetch, window: int) -> ReadAhead:
        made.append(ReadAhead(wanted, prefetch, 1))
        return made[0]

    monkeypatch.setattr(weights, "ReadAhead", make)
    (path / "model.safetensors").rename(path / "other.safetensors")
    config = load_model_config(path)
    tensors = load_file(path / "other.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="up_proj"):
        load_model(path, config, LoadOptions("float32"), make_backends(config, "torch"))
    ended(made[0])


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="names of open files need /proc")
def test_ranks_of_a_host_read_different_parts_within_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "PART_BYTES", 100)
    files = [tmp_path / name for name in ("x", "y")]
    for file in files:
        file.write_bytes(b"")
    wanted = [Span(files[0], 50, 50 + 730), Span(files[1], 0, 999)]
    num_ranks, found = random.randrange(1, 5), []
    for rank in range(num_ranks):
        read = Read(monkeypatch)
        ahead = ReadAhead(wanted, window=10_000, prefetch=Prefetch(3, rank, num_ranks))
        ended(ahead)
        found += read
        monkeypatch.undo()
        monkeypatch.setattr(read_ahead, "PART_BYTES", 100)
    places = {(str(files[0]), start, 100) for start in range(50, 750, 100)}
    places |= {(str(files[1]), start, 100) for start in range(0, 900, 100)}
    assert len(found) == len(set(found)) == 18, "every part once"
    assert sum(size for _, _, size in found) == 730 + 999 and places < set(found)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="names of open files need /proc")
def test_reading_threads_follow_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "PART_BYTES", 100)
    file = tmp_path / "x"
    file.write_bytes(b"")
    read = Read(monkeypatch)
    ahead = ReadAhead([Span(file, 0, 1000)], window=300, prefetch=Prefetch(2))
    read.wait(3)
    ahead.take(100)
    read.wait(4)
    assert sorted(start for _, start, _ in read) == [0, 100, 200, 300]
    ahead.close()
    ended(ahead)
    assert len(read) == 4


def test_a_load_with_threads_reads_what_it_needs_and_drops_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1, tokenizer=False)
    config, dropped = load_model_config(path), list[tuple[int, int, int]]()
    want = load_model(path, config, LoadOptions("float32"), make_backends(config, "torch"))
    real = os.posix_fadvise

    def advise(file: int, start: int, size: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append((start, size, os.fstat(file).st_size))
        real(file, start, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    options = LoadOptions("float32", prefetch=Prefetch(2, 1, 2), drop_cache=True)
    model = load_model(path, config, options, make_backends(config, "torch"))
    assert dropped == [(0, 0, (path / "model.safetensors").stat().st_size)]
    pairs = zip(weights_of(model), weights_of(want), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    drop_cache([tmp_path / "gone"])
