"""What is launched is what was compiled ahead of time, for every number of tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_cases_are_what_launches_ask_for() -> None:
    """The keys in Triton's cache of the cases are those of the launches: odd counts, one, multiples of 16."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.outside_experts"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["not launched"] == found["no case"] == [] and len(found["launched"]) > 15, found
