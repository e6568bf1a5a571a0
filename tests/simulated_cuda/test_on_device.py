"""Runs the tests of `on_device/`, some of those for real GPUs, and the GPU suite in separate processes, because
devices stay simulated until the process exits."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from benchmarks.gpu_suite import __main__ as suite
from benchmarks.gpu_suite import all_reduce, cases, parts
from tests import random_seed
from tests.examples import FACTOR
from tests.fork_server import ForkedProcess, ForkServer
from tests.kernels.triton import on_gpu
from tests.simulated_cuda.conftest import DEVICES, ROOT
from tests.simulated_cuda.failures import BREAKS

FOLDER = Path(__file__).with_name("on_device")
ENGINES = FOLDER / "test_engines.py"
FILES = {"engines": [ENGINES], "parts": sorted({*FOLDER.glob("test_*.py")} - {ENGINES})}
PYTEST = ["pytest", "-p", "tests.simulated_cuda.plugin", "-p", "no:cacheprovider"]
BROKEN = {case.name for case in cases.tiny_cases() if case.name.startswith(("tiny.expanded", "chunks", "varlen"))}
"""Those that launch `expanded_kernel`."""
OTHERS = sorted({case.name for case in cases.tiny_cases()} - BROKEN)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_on_device(files: list[Path], device_server: ForkServer, tmp_path: Path) -> None:
    command = [*PYTEST, *map(str, files), "--durations=12"]
    # programs started by these tests have no simulated devices; a second attempt has other random values
    variables = {"PYTHONPATH": str(ROOT), random_seed.NAME: str(random.getrandbits(32))}
    code, out, errors = device_server.run(command, tmp_path, 890.0, **variables)
    assert code == 0 and " passed" in out and "skipped" not in out, out[-20000:] + errors[-3000:]


@pytest.mark.drawn(1)
def test_a_file_runs_directly() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(FOLDER / "test_rules.py")]
    run = subprocess.run([*command, "-k", "mixed"], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.drawn(1)
def test_tests_for_a_gpu_run_on_a_simulated_one(device_server: ForkServer, tmp_path: Path) -> None:
    """The fast ones, in forked processes: the one that collects must not look for devices. `pytest -p
    tests.simulated_cuda.plugin -m gpu tests` runs all possible ones."""
    files = [
        "worker/test_before_ready.py",
        "kernels/vendors/test_on_gpu.py",
        "distributed/dispatch/test_symm_mem_gpu.py",
    ]
    chosen = "a_cuda_graph_reads or test_recorded_absorbed[1-triton] or streams_of_their_own"
    command = [
        *PYTEST,
        "-m",
        "gpu",
        "-q",
        "--processes",
        "2",
        "-k",
        chosen,
        *(str(ROOT / "tests" / file) for file in files),
    ]
    code, out, errors = device_server.run(command, tmp_path, 250.0)
    assert code == 0 and sorted(out.split()[0]) == [".", ".", "s"], out[-20000:] + errors[-3000:]


@pytest.mark.drawn(1)
def test_tests_of_kernels_run_on_a_gpu(device_server: ForkServer, tmp_path: Path) -> None:
    """A file of them, whose launches have the GPU's memory."""
    name = random.choice(["pools", "gated_streams", "lora", "ngrams"])
    command = [*PYTEST, "-q", str(ROOT / f"tests/kernels/triton/test_{name}.py")]
    variables = {on_gpu.GPU: "1", "SIMULATED_CUDA_LAUNCHED": str(tmp_path)}
    code, out, errors = device_server.run(command, tmp_path, 250.0, **variables)
    assert code == 0 and " failed" not in out, out[-20000:] + errors[-3000:]
    assert list(tmp_path.glob("*_kernel"))


@pytest.mark.drawn(1)
def test_a_kernel_that_loses_the_gpu_costs_its_own_lines(
    device_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The GPU suite, with parts in processes whose device one kernel loses."""

    def start_process(arguments: list[str], errors: IO[Any]) -> ForkedProcess:
        command, environment = ["benchmarks.gpu_suite.__main__", *arguments], {**os.environ, **DEVICES}
        output = errors.fileno(), errors.fileno()
        return ForkedProcess(device_server.address, command, output, environment | {BREAKS: "expanded_kernel"})

    monkeypatch.setattr(parts, "start_process", start_process)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # this process computes nothing
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "simulated")
    output = tmp_path / "r.json"
    asked = ["aot", "exchange", "kernels"] if FACTOR > 1 else ["aot", "kernels"]  # exchanges start three processes
    some = BROKEN | set(OTHERS if FACTOR > 1 else random.sample(OTHERS, 3))
    arguments = ["--dry-run", "cuda", "--output", str(output), "--parts", *asked, "--only", *some]
    assert suite.main(arguments) == 0
    printed, result = capfd.readouterr().out, json.loads(output.read_text())
    lines = [line for line in result["kernels"]["lines"] if line["row"] == "triton" and line["kernel"] in some]
    lost = {line["kernel"] for line in lines if "illegal memory access" in line.get("failed", "")}
    assert lost == BROKEN and result["kernels"]["restarts"] == len(BROKEN) and "failed" not in result["kernels"]
    assert {line["kernel"] for line in lines} == some
    assert all("us" in line for line in lines if line["kernel"] not in lost)
    assert "interpreted" in result["aot"]["skipped"]  # a forked process found the device
    if "exchange" in asked:
        lines = result["exchange"]["lines"]
        assert all(line["ok"] for line in lines) and len(lines) == 2 + len(all_reduce.ROWS)
    named = [line for line in printed.splitlines() if re.search("kernels: .*: .*illegal memory access", line)]
    assert all(f"{name} with triton" in " ".join(named) for name in BROKEN)  # equal reasons are in one line
