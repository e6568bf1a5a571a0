"""Programmatic dependent launches: which kernels have them, that they wait before their first access to memory, and
that they announce the next launch.

The compiled code of every kernel is checked by `test_aot.py` (`AotReport.problems`).
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from benchmarks.step_costs.recorder import LATE

pytest.importorskip("triton", reason="needs triton")
ROOT = Path(__file__).resolve().parents[3] / "kernels"
WAITS_FOR_OTHERS = {
    "receive_kernel", "sum_kernel", "one_shot_kernel", "two_shot_kernel", "route_kernel",
}  # fmt: skip
"""For peers, or for programs of the same launch: announces the next launch after that wait."""
MAY_WAIT_FOR_OTHERS = {"norm_route_kernel"}
"""The same, if its argument WAITS says so."""
BEHIND_ANOTHER_STREAM = {"send_kernel", "combine_send_kernel"}
"""Launched after an event of another stream: not dependent."""


def kernels() -> list[tuple[str, bool, list[str]]]:
    """(name, declared by `dependent_jit`, names that the statements of its body call first) of every kernel."""
    found = []
    for file in ROOT.rglob("*.py"):
        text = file.read_text()
        if "_jit" not in text and "triton.jit" not in text:
            continue
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.endswith("_kernel"):
                continue
            declared = any("dependent_jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            body = node.body[1:] if ast.get_docstring(node) else node.body
            found.append((node.name, declared, [ast.unparse(line) for line in body]))
    return found


def test_dependent_kernels_wait_first() -> None:
    all_kernels = kernels()
    declared = {name for name, is_dependent, _ in all_kernels if is_dependent}
    assert len(declared) > 40 and declared >= WAITS_FOR_OTHERS and not declared & BEHIND_ANOTHER_STREAM
    assert {name for name, _, _ in all_kernels} >= BEHIND_ANOTHER_STREAM
    assert LATE == WAITS_FOR_OTHERS, "step_costs counts their announcement as late"
    for name, is_dependent, body in all_kernels:
        first = "wait_for_inputs(announce=False)" if name in WAITS_FOR_OTHERS else "wait_for_inputs()"
        first = "wait_for_inputs(announce=not WAITS)" if name in MAY_WAIT_FOR_OTHERS else first
        statements = [line for line in body if not line.startswith("prefetch_own(")]
        assert body[-len(statements) :] == statements, f"{name} requests its own weights after the wait"
        assert (first in statements[:1]) == is_dependent, name
        assert not any("wait_for_inputs" in line for line in statements[1:]), name


def test_the_compiled_code_waits_before_its_first_access(compiling, tmp_path) -> None:
    module = "tests.kernels.triton.dependent_kernels"
    code, out, errors = compiling.run([module], tmp_path, 120.0, TRITON_CACHE_DIR=str(tmp_path))
    assert code == 0, errors[-3000:]
    found = json.loads(out)
    assert found["kernels"]["waiting_kernel"] == [True, [], []]
    for name in ("hasty_kernel", "forgetful_kernel"):
        dependent, before, problems = found["kernels"][name]
        assert dependent and before[0].startswith("ld.global") and "wait_for_inputs" in problems[0], name
    dependent, before, problems = found["kernels"]["silent_kernel"]
    assert dependent and not before and "announce_next" in problems[0]
    assert found["ptx"]["waiting_kernel"] == {
        "sm_80": [0, 0], "sm_90": [1, 1], "sm_100": [1, 1], "sm_90 cooperative": [0, 0], "sm_80 cooperative": [0, 0],
    }  # fmt: skip
    assert found["ptx"]["late_kernel"] == {
        "sm_80": [0, 0], "sm_90": [1, 1], "sm_100": [1, 1], "sm_90 cooperative": [0, 1], "sm_80 cooperative": [0, 0],
    }  # fmt: skip
    assert found["launched"] == [True, False]
    assert "waiting_kernel" in found["declared"]
