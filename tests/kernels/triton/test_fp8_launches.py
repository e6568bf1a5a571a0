"""What is launched is what was compiled ahead of time, for every number of tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_cases_are_what_launches_ask_for(tmp_path: Path) -> None:
    """The real rows find every kernel in the cache that the cases filled: odd counts, one, multiples of 16."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.triton.outside_experts", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    cases, launched, num_cached = json.loads(done.stdout)
    assert len(launched) == num_cached == len(cases), (cases, launched, num_cached)
