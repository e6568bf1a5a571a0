"""Runs the tests of `on_device/` in separate processes, because devices stay simulated until the process exits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.simulated_cuda.conftest import ROOT

FOLDER = Path(__file__).with_name("on_device")
ENGINES = FOLDER / "test_engines.py"
FILES = {"engines": [ENGINES], "parts": sorted({*FOLDER.glob("test_*.py")} - {ENGINES})}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_on_device(files: list[Path], device_server: ForkServer, tmp_path: Path) -> None:
    command = ["pytest", "-p", "tests.simulated_cuda.plugin", "-p", "no:cacheprovider", *map(str, files)]
    # programs started by these tests have no simulated devices
    code, out, errors = device_server.run([*command, "--durations=12"], tmp_path, 890.0, PYTHONPATH=str(ROOT))
    assert code == 0 and " passed" in out and "skipped" not in out, out[-20000:] + errors[-3000:]
