"""`moe-engine calibrate`: its server ends with it, and the server's refusals are its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_engine.cli.main import main
from moe_engine.planning.inputs.checkpoint import embedded_model
from tests.waiting import children_with, is_running, until


@pytest.mark.skipif(sys.platform != "linux", reason="a program learns of its parent's end on Linux only")
def test_the_server_ends_with_a_killed_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moe_engine", "calibrate", "--output", str(tmp_path / "costs.json")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        (server,) = until(lambda: children_with(process.pid, "serve"))
        process.kill()
    until(lambda: not is_running(server), "the server runs without its parent")


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of the server in /proc")
def test_a_server_that_ends_during_the_measurement_is_named(tmp_path: Path) -> None:
    """The engine core is killed while it computes requests of the measurement; then the server ends."""
    command = [sys.executable, "-m", "moe_engine", "calibrate", "--output", str(tmp_path / "costs.json")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if line.startswith("measuring: "))
        (server,) = children_with(process.pid, "serve")
        (core,) = children_with(server, "moe_engine.cluster.core_main")
        os.kill(core, signal.SIGKILL)
        lines = [line for line in process.stderr if not line.startswith("measuring: ")]
    assert process.returncode == 1 and len(lines) == 1
    assert lines[0].startswith("moe-engine calibrate: the server ended with code 1: ") and "SIGKILL" in lines[0]
    assert not (tmp_path / "costs.json").exists()


def test_a_refusal_of_the_server_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server alone reads the tokenizer."""
    model = tmp_path / "model"
    shutil.copytree(embedded_model(), model)
    (model / "tokenizer.json").write_text("{")
    assert main(["calibrate", "--model-path", str(model), "--output", str(tmp_path / "costs.json")]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[20")]
    assert len(lines) == 1 and lines[0].startswith(f"moe-engine calibrate: error: {model}/tokenizer.json: ")
