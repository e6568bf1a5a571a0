"""Runs the tests of `on_device/`, each file in a process of its own: devices stay simulated until the process exits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(Path(__file__).with_name("on_device").glob("test_*.py"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_on_device(file: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.simulated_cuda.plugin", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-20000:] + done.stderr[-3000:]
