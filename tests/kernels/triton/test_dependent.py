"""Programmatic dependent launches: which kernels have them, and that they wait before their first access to memory.

The compiled code of every kernel is checked by `test_aot.py` (`AotReport.problems`).
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")
ROOT = Path(__file__).resolve().parents[3] / "kernels"
WAITS_FOR_OTHERS = {
    "send_kernel", "receive_kernel", "combine_send_kernel", "sum_kernel", "one_shot_kernel",
    "two_shot_kernel", "route_kernel", "norm_route_kernel",
}  # fmt: skip
"""Of peers, or of programs of the same launch."""


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
    assert len(declared) > 40 and not declared & WAITS_FOR_OTHERS
    assert {name for name, _, _ in all_kernels} >= WAITS_FOR_OTHERS
    for name, is_dependent, body in all_kernels:
        assert ("wait_for_inputs()" in body[:1]) == is_dependent, name
        assert not any("wait_for_inputs" in line for line in body[1:]), name


def test_the_compiled_code_waits_before_its_first_access(compiling, tmp_path) -> None:
    module = "tests.kernels.triton.dependent_kernels"
    code, out, errors = compiling.run([module], tmp_path, 120.0, TRITON_CACHE_DIR=str(tmp_path))
    assert code == 0, errors[-3000:]
    found = json.loads(out)
    assert found["kernels"]["waiting_kernel"] == [True, [], []]
    for name in ("hasty_kernel", "forgetful_kernel"):
        dependent, before, problems = found["kernels"][name]
        assert dependent and before[0].startswith("ld.global") and "wait_for_inputs" in problems[0], name
    assert found["ptx"] == {"sm_80": [0, 0], "sm_90": [1, 1], "sm_100": [1, 1], "sm_90 cooperative": [0, 0]}
    assert found["launched"] == [True, False]
    assert "waiting_kernel" in found["declared"]
