"""What the host does with a GPU, on a simulated one: answers as on the CPU, steps replayed, nobody waits in between."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def outside(module: str, *arguments: str) -> Any:
    """What a module of this folder prints, run as a process of its own: devices are simulated for good."""
    command = [sys.executable, "-m", f"tests.simulated_cuda.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


def check_answers(found: dict[str, Any]) -> None:
    for rid, expected in found["expected"].items():
        answer = found["found"][rid]
        assert answer["logprobs"] == pytest.approx(expected["logprobs"], abs=2e-5), rid
        assert {**answer, "logprobs": 0} == {**expected, "logprobs": 0}, rid
    assert len(found["expected"]) >= 3 and any(answer["cached"] for answer in found["found"].values())


def waits_of_ours(found: dict[str, Any]) -> list[str]:
    """But for torch's rows of kernels, which read on the host and are not for GPUs."""
    return [wait for wait in found["waits"] if "reference.py" not in wait and "dispatch/local.py" not in wait]


def test_kernels_of_our_own_recorded() -> None:
    found = outside("outside_engine", "triton")
    check_answers(found)
    assert found["graphs"] == 2 and found["waits"] == []
    launched = set(found["kernels"])
    assert launched >= {"latent_kernel", "expanded_kernel", "gate_up_kernel", "router_select_kernel", "greedy_kernel"}


def test_chains_of_drafts_recorded() -> None:
    """A step with drafts asks once where its rows have come to. Log-probabilities and penalties of drafts are found on
    the device."""
    found = outside("outside_engine", "drafts")
    check_answers(found)
    assert found["graphs"] == 4
    assert found["waits"] and all("batch/token_buffer.py" in wait for wait in found["waits"]), found["waits"]


def test_trees_of_drafts() -> None:
    found = outside("outside_engine", "tree")
    check_answers(found)
    reads = ("batch/token_buffer.py", "speculation/tree.py", "device_stream.py:")
    assert all(any(read in wait for read in reads) for wait in waits_of_ours(found)), waits_of_ours(found)


def test_logits_that_are_edited_and_told() -> None:
    """Biases, penalties, minimal lengths, log-probabilities, every kind of sampling: nothing waits for the device."""
    found = outside("outside_engine", "edits")
    check_answers(found)
    assert waits_of_ours(found) == []


def test_plans_of_a_library_are_renewed() -> None:
    """FlashInfer's emulator: its page-locked plan is written again only when its copy has ended."""
    found = outside("outside_engine", "flashinfer")
    check_answers(found)
    assert found["graphs"] == 2
    own = [wait for wait in found["waits"] if "flashinfer_emulator.py" not in wait]  # the library's own copies
    assert all(wait.startswith("Event.synchronize: vendors/flashinfer.py") for wait in own), own
