"""Files that a rank reads ahead of a method, beside its steps: which parts of them, and what hangs."""

from __future__ import annotations

import io
import os
import random
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_engine.models.checkpoint.safetensors_header import read_header
from moe_engine.worker import read_ahead
from moe_engine.worker.read_ahead import FilesArgs, PageCacheReads
from tests.waiting import until

MB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A safetensors checkpoint, a file of another format, and a named pipe, which must not be opened."""
    save_file({"a": torch.zeros(10 * MB)}, tmp_path / "model.safetensors")
    (tmp_path / "model.gguf").write_bytes(bytes(48 * MB))
    (tmp_path / "config.json").write_bytes(random.randbytes(1000))
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """By file, the beginnings and ends of its reads."""
    found: dict[str, list[tuple[int, int]]] = {}

    class File(io.FileIO):
        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            begin = self.tell()
            count = super().readinto(buffer) or 0
            if count:
                found.setdefault(os.path.basename(str(self.name)), []).append((begin, begin + count))
            return count

    monkeypatch.setattr(read_ahead, "open", lambda path, mode, buffering: File(path), raising=False)
    return found


def read(args: FilesArgs) -> None:
    files = PageCacheReads()
    until(lambda: not files.is_reading(args))


def test_whole_files(folder: Path, seen: dict[str, list[tuple[int, int]]]) -> None:
    read(FilesArgs("1", str(folder)))
    assert seen.keys() == {"model.safetensors", "model.gguf", "config.json"}
    for name, parts in seen.items():
        assert sum(end - begin for begin, end in parts) == (folder / name).stat().st_size
    seen.clear()
    read(FilesArgs("2", str(folder / "model.gguf")))
    assert seen.keys() == {"model.gguf"}
    read(FilesArgs("3", str(folder / "missing")))


def test_an_unreadable_file_does_not_end_the_others(
    folder: Path, seen: dict[str, list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    intact = {"config.json", "model.gguf"}
    opened = read_ahead.open  # type: ignore[attr-defined]

    def fail(path: str, mode: str, buffering: int) -> io.FileIO:
        if path.endswith(".safetensors"):
            raise OSError("input/output error")
        return opened(path, mode, buffering)

    monkeypatch.setattr(read_ahead, "open", fail)
    for place in range(20):  # before and after the intact ones in the folder's order
        (folder / f"loop-{place}").symlink_to(f"loop-{place}")
        (folder / f"{place}.safetensors").write_bytes(b"")
    read(FilesArgs("1", str(folder)))
    assert seen.keys() == intact


def test_headers_only(folder: Path, seen: dict[str, list[tuple[int, int]]]) -> None:
    read(FilesArgs("1", str(folder), headers_only=True))
    first = min(header.start for header in read_header(folder / "model.safetensors").values())
    assert max(end for _, end in seen["model.safetensors"]) >= first
    assert sum(end - begin for begin, end in seen["model.safetensors"]) <= read_ahead.CHUNK_BYTES
    assert sum(end - begin for begin, end in seen["config.json"]) == 1000
    read_bytes = {position // MB for begin, end in seen["model.gguf"] for position in range(begin, end, MB)}
    assert read_bytes == {*range(16), *range(32, 48)}


def test_a_reading_that_hangs_does_not_delay_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted, config = threading.Event(), str(folder / "config.json")
    monkeypatch.setattr(read_ahead, "_read", lambda path, headers: path == config or mounted.wait(60))
    files, hanging, other = PageCacheReads(), FilesArgs("1", str(folder)), FilesArgs("2", config)
    assert files.is_reading(hanging)
    until(lambda: not files.is_reading(other))
    assert files.is_reading(hanging)
    mounted.set()
    until(lambda: not files.is_reading(hanging))
