"""The end of a program that used msgspec types of the engine: its last collection must not see them (msgspec #717)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, gc, os, sys
atexit.register(lambda: print(gc.get_freeze_count() > len(gc.get_objects()), flush=True))  # the last one to run
import moe_engine
assert "torch" not in sys.modules and not gc.get_freeze_count()
from moe_engine.core import messages
"""


def test_objects_are_frozen_at_exit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2]
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
