"""Kernels compiled ahead of time for sm_90 and sm_100, without a GPU: one case of each here (for sm_100 those with
large tiles), all of them by ``python -m benchmarks.aot_table``. In processes of their own, for under the interpreter
kernels cannot be compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_engine.kernels.triton import guard
from moe_engine.kernels.triton.availability import version
from moe_engine.kernels.triton.modules import MODULES
from tests.examples import FACTOR

pytest.importorskip("triton", reason="needs triton")
ROOT = Path(__file__).resolve().parents[3]
KNOWN_BEFORE_3_9 = {
    "latent attention, 128 heads, 1 tokens, bf16 sm_100",  # too much shared memory: `why_not_latent` refuses the row
    "expanded attention, heads of 192 and 128, fp32 sm_100",  # spills 48 bytes; no model is served so
}
PROBLEM_FREE = (0, 1)  # exit code 1: some kernel is not fit to ship; the tests below say which


def outside(module: str, *arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Runs a module without the interpreter, with a Triton cache of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("aot")
    arguments = ("--one-of-each" if FACTOR > 1 else "--quick", "--processes", "2", "--output", str(folder / "aot.json"))
    done = outside("benchmarks.aot_table", *arguments, cache=folder / "cache")
    assert done.returncode in PROBLEM_FREE, done.stderr[-3000:]
    return json.loads((folder / "aot.json").read_text())["kernels"]


def test_every_kernel_is_fit_to_ship(reports):
    """It compiles, spills nothing, fits into shared memory, and uses tensor cores where it multiplies matrices."""
    known = KNOWN_BEFORE_3_9 if version() < (3, 9) else set()
    problems = [f"{r['name']} sm_{r['arch']}: {p}" for r in reports for p in r["problems"]]
    problems = [problem for problem in problems if problem.partition(":")[0] not in known]
    assert not problems, "\n".join(problems)
    assert {r["arch"] for r in reports} == {90, 100}


def test_large_tiles_use_the_instructions_of_their_architecture(reports):
    found = {arch: {i for r in reports if r["arch"] == arch for i in r["instructions"]} for arch in (90, 100)}
    assert "wgmma" in found[90] and "tcgen05" not in found[90]
    assert "tcgen05" in found[100] and "wgmma" not in found[100]


def test_every_module_with_cases_is_listed():
    files = [f for f in (ROOT / "kernels").rglob("*.py") if "\ndef aot_cases(" in f.read_text()]
    names = {f.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for f in files}
    assert {f"moe_engine.{name}" for name in names} == set(MODULES)
    assert len(MODULES) == len(set(MODULES))


def test_cases_are_what_launches_ask_for(tmp_path):
    """The keys in Triton's cache of the cases are those of the launches of the real rows, for any token count."""
    done = outside("tests.kernels.triton.outside", "agreement", str(tmp_path), cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["not launched"] == found["no case"] == [] and len(found["launched"]) > 10, found


def test_the_guard_counts_what_compiles_after_ready(tmp_path):
    done = outside("tests.kernels.triton.outside", "guarding", str(tmp_path), cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [0, 0, 1]
    assert "rms_norm_kernel was compiled" in done.stderr


def test_warm_up_reaches_every_kernel_of_a_plan(tmp_path):
    """Steps of any size need no kernel that the ladder's did not; a ladder of its ends would have missed some."""
    done = outside("tests.kernels.triton.outside", "reachable", str(tmp_path / "models"), cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, (count, missing, missing_without) in json.loads(done.stdout).items():
        assert count > 20 and missing == [], name
        assert "router_logits_kernel" in missing_without, name


def test_experts_whose_tokens_travel_warm_up_every_tile(tmp_path):
    """A warm-up's own tokens may all go to other ranks. Two products for each of four sizes, and for three means of
    padded rows."""
    done = outside("tests.kernels.triton.outside", "dispatched", str(tmp_path), cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for runs, num_warm, num_needed, missing in json.loads(done.stdout):
        assert runs == 14 and missing == 0 and num_warm == num_needed >= 7


def test_the_guard_is_silent_until_something_compiles():
    guard.reset()
    guard.ready()
    assert guard.compilations_after_ready() == 0
