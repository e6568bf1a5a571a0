"""Files are asked for in the order of layers, in a window ahead of the loader; the thread ends with the load."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.errors import CheckpointError
from moe_engine.models import read_ahead, weights
from moe_engine.models.config_file import load_model_config
from moe_engine.models.loader import load_model
from moe_engine.models.read_ahead import ReadAhead, Span, spans
from moe_engine.models.tensor_header import TensorHeader
from moe_engine.models.weights import WeightReader
from tests.models.checkpoints import make_checkpoint
from tests.models.stepper import make_backends

MIB = 1 << 20


def headers(*places: tuple[str, int, int]) -> dict[str, TensorHeader]:
    return {name: TensorHeader("BF16", (), start, stop) for name, start, stop in places}


def test_spans_follow_the_layers_and_join_neighbours() -> None:
    one = SimpleNamespace(
        path=Path("1"),
        entries=headers(
            ("model.layers.10.a", 8, 20), ("model.layers.2.a", 20, 30), ("model.layers.2.b", 30, 44), ("unread", 44, 50)
        ),
    )  # fmt: skip
    two = SimpleNamespace(path=Path("2"), entries=headers(("model.embed_tokens.weight", 8, 16)))
    files: dict[str, Any] = dict.fromkeys(one.entries, one) | dict.fromkeys(two.entries, two)
    assert spans(files, files.keys() - {"unread"}) == [
        Span(Path("2"), 8, 16), Span(Path("1"), 20, 44), Span(Path("1"), 8, 20),
    ]  # fmt: skip


class Asked(list[tuple[int, int]]):
    """(start, size) of the thread's calls of posix_fadvise."""

    changed = threading.Condition()

    def note(self, file: int, start: int, size: int, advice: int) -> None:
        if threading.current_thread().name.startswith("read-ahead"):
            with self.changed:
                self.append((start, size))
                self.changed.notify()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self) >= count, 60)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked()
    monkeypatch.setattr(os, "posix_fadvise", found.note)
    return found


def ended(ahead: ReadAhead) -> None:
    assert ahead.work is not None
    ahead.work.result(60)


def test_the_window_follows_the_loader(tmp_path: Path, asked: Asked) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"")
    part = read_ahead.PART_BYTES
    ahead = ReadAhead([Span(file, 0, 3 * part), Span(file, 100 * part, 101 * part + 5)], window=2 * part)
    asked.wait(2)
    assert asked == [(0, part), (part, part)]
    ahead.take(part)
    asked.wait(3)
    ahead.take(part)
    asked.wait(4)
    ahead.take(part)
    asked.wait(5)
    assert asked[2:] == [(2 * part, part), (100 * part, part), (101 * part, 5)]
    ahead.close()
    ended(ahead)


def test_a_missing_file_and_an_early_end_end_the_thread(tmp_path: Path, asked: Asked) -> None:
    gone = ReadAhead([Span(tmp_path / "gone", 0, MIB)])
    ended(gone)
    file = tmp_path / "x"
    file.write_bytes(b"")
    waiting = ReadAhead([Span(file, 0, 1 << 40)], window=1)
    asked.wait(1)
    waiting.close()
    ended(waiting)
    assert len(asked) == 1


def test_a_load_asks_for_what_it_reads_and_a_failed_one_ends(tmp_path: Path, asked: Asked) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1, tokenizer=False)
    reader = WeightReader(path, torch.float32, ahead=True, ignore=lambda names: {"lm_head.weight"})
    entries = next(iter(reader._files.values())).entries
    total = sum(header.num_bytes for name, header in entries.items() if name != "lm_head.weight")
    ahead: Any = reader._ahead
    ended(ahead)
    assert sum(size for _, size in asked) == total
    for name, header in entries.items():
        reader.tensor(name, header.shape)
    assert ahead._taken == total
    reader.finish()


def test_a_failed_load_ends_the_thread(tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1, tokenizer=False)
    made: list[ReadAhead] = []

    def make(wanted: list[Span]) -> ReadAhead:
        made.append(ReadAhead(wanted, window=1))
        return made[0]

    monkeypatch.setattr(weights, "ReadAhead", make)
    (path / "model.safetensors").rename(path / "other.safetensors")
    config = load_model_config(path)
    tensors = load_file(path / "other.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="up_proj"):
        load_model(path, config, "float32", "cpu", make_backends(config, "torch"))
    ended(made[0])
