"""Runs the tests of `on_device/` in processes of their own: devices stay simulated until the process exits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_name("on_device")
ENGINES = FOLDER / "test_engines.py"
FILES = {"engines": [ENGINES], "parts": sorted({*FOLDER.glob("test_*.py")} - {ENGINES})}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_on_device(files: list[Path]) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.simulated_cuda.plugin", "-p", "no:cacheprovider"]
    command += [*map(str, files), "--durations=12"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-20000:] + done.stderr[-3000:]
