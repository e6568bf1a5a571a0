"""Folders of killed front ends go at the next start; those of living ones, and other people's, stay."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moe_engine.engine.run_folder import PREFIX, RunFolder, remove_abandoned

HOLD = """
import sys
from moe_engine.engine.run_folder import RunFolder
folder = RunFolder()
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
        (path / "board").write_text("x")
        mine = RunFolder()
        assert path.is_dir() and mine.path.is_dir() and mine.path != path
        other.kill()
    remove_abandoned()
    assert not path.exists() and mine.path.is_dir()
    mine.remove()
    assert not mine.path.exists()


LEAVE = """
import os, sys
from moe_engine.engine.run_folder import RunFolder
folder = RunFolder()
if not os.fork():
    sys.exit()
os.wait()
print(folder.path, folder.path.is_dir(), flush=True)
sys.exit()
"""


def test_a_program_that_exits_takes_its_folder_along(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVE], capture_output=True, text=True, check=True,
        env={"TMPDIR": str(tmp_path)}, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    path, after_the_child = done.stdout.split()
    assert after_the_child == "True"
    assert Path(path).parent == tmp_path and not Path(path).exists()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    unlocked, file, other = tmp_path / f"{PREFIX}abc", tmp_path / f"{PREFIX}file", tmp_path / "else"
    unlocked.mkdir()
    other.mkdir()
    file.write_text("")
    (other / "owner").write_text("")
    remove_abandoned()
    assert unlocked.is_dir() and file.is_file() and other.is_dir()
