"""Folders of killed frontends are removed at the next start; folders of running frontends and of other users stay."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from moe_engine import Engine
from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.planning.prepare import prepare
from moe_engine.processes import runtime_dir as run_folder
from moe_engine.processes.runtime_dir import (
    LONGEST_NAME,
    MAX_SOCKET_PATH,
    PREFIX,
    RANDOM_CHARACTERS,
    RuntimeDir,
    remove_abandoned,
)

HOLD = """
import sys
from moe_engine.processes.runtime_dir import RuntimeDir
folder = RuntimeDir()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_folder_lives_as_long_as_its_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={"TMPDIR": str(tmp_path)}, cwd=Path(__file__).resolve().parents[2],
    ) as other:  # fmt: skip
        assert other.stdout is not None
        path = Path(other.stdout.readline().strip())
        (path / "status").write_text("x")
        mine = RuntimeDir()
        assert path.is_dir() and mine.path.is_dir() and mine.path != path
        other.kill()
    remove_abandoned()
    assert not path.exists() and mine.path.is_dir()
    mine.remove()
    assert not mine.path.exists()


LEAVE = """
import os, sys
from moe_engine.processes.runtime_dir import RuntimeDir
folder = RuntimeDir()
if not os.fork():
    sys.exit()
os.wait()
print(folder.path, folder.path.is_dir(), flush=True)
sys.exit()
"""


def test_folder_is_removed_at_exit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVE], capture_output=True, text=True, check=True,
        env={"TMPDIR": str(tmp_path)}, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    path, after_the_child = done.stdout.split()
    assert after_the_child == "True"
    assert Path(path).parent == tmp_path and not Path(path).exists()


def test_foreign_folders_are_kept(tmp_path: Path) -> None:
    unlocked, file, other = tmp_path / f"{PREFIX}abc", tmp_path / f"{PREFIX}file", tmp_path / "else"
    unlocked.mkdir()
    other.mkdir()
    file.write_text("")
    (other / "owner").write_text("")
    remove_abandoned()
    assert unlocked.is_dir() and file.is_file() and other.is_dir()


def long_folder(tmp_path: Path) -> Path:
    made = tmp_path / "t" / ("x" * (120 - len(str(tmp_path)) - 3))
    made.mkdir(parents=True)
    return made


def socket_fits(folder: RuntimeDir) -> None:
    """The longest socket name, of an attention group, can be bound in the folder."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder.path / LONGEST_NAME))


@pytest.mark.parametrize("runtime", ["given", "too long", "missing", "not set"])
def test_a_long_temporary_folder_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(long_folder(tmp_path)))
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as short:
        place = {
            "given": short,
            "too long": str(long_folder(tmp_path / "b")),
            "missing": f"{short}/none",
            "not set": "",
        }
        monkeypatch.setenv("XDG_RUNTIME_DIR", place[runtime])
        folder = RuntimeDir()
        assert str(folder.path.parent) == (short if runtime == "given" else "/tmp")
        assert folder.path.stat().st_mode & 0o777 == 0o700
        socket_fits(folder)
        folder.remove()
        assert not folder.path.exists()


@pytest.mark.parametrize("spare", [0, -1])
def test_the_limit_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    """A name of the maximum length is accepted, one byte more is not; bytes count, not characters."""
    longest = MAX_SOCKET_PATH - len(f"/{PREFIX}{'x' * RANDOM_CHARACTERS}/{LONGEST_NAME}")
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        name = "ü" + "y" * (longest - len(parent) - 3 - spare)
        place = Path(parent, name)
        place.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        folder = RuntimeDir()
        assert (folder.path.parent == place) == (spare == 0)
        socket_fits(folder)
        folder.remove()


def test_no_usable_folder_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = str(long_folder(tmp_path))
    monkeypatch.setattr(run_folder, "_places", lambda: [long])
    monkeypatch.setattr(tempfile, "tempdir", long)
    with pytest.raises(ConfigError, match=rf"TMPDIR={long}: .* set TMPDIR to such a directory"):
        RuntimeDir()


def test_folders_of_killed_front_ends_are_removed_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "runtime"
    left = other / f"{PREFIX}left"
    left.mkdir(parents=True)
    (left / "owner").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))
    remove_abandoned()
    assert not left.exists()


@pytest.mark.usefixtures("forked_processes")
def test_an_engine_serves_under_a_temporary_folder_of_120_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = long_folder(tmp_path)
    assert len(str(folder)) == 120
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read again
    assert tempfile.gettempdir() == str(folder)
    with Engine(tp_size=2, max_total_tokens=2048, cpu_threads=1) as engine:
        answer: Any = engine.generate("What is the capital of France?", {"max_new_tokens": 4})
    assert answer["text"].strip()


def test_a_machine_without_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR, /tmp and the rest are unusable, and so is the working directory: `tempfile` raises."""

    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = RuntimeDir()  # of the session
    assert folder.path.parent == tmp_path
    folder.remove()
    with pytest.raises(ConfigError, match=r"^TMPDIR \(/nowhere\), /tmp, .* take no file: set TMPDIR .* read-only root"):
        prepare(EngineArgs.from_kwargs())
    monkeypatch.setattr(run_folder.os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"TMPDIR=/nowhere: .* set TMPDIR to such a directory"):
        RuntimeDir()


def test_a_full_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for a directory, or for the file in it."""
    monkeypatch.setattr(run_folder, "_lock", lambda path, *, wait: None)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: .*: owner cannot be created .*; set TMPDIR to a usable one"):
        RuntimeDir()
    assert not list(tmp_path.iterdir())

    def full(**_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: .*: No space left on device; set TMPDIR"):
        RuntimeDir()
