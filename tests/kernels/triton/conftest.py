"""Triton kernels under Triton's interpreter: on the CPU, in this process, without a GPU and without a compiler.

Triton selects the interpreter at the decoration of functions: its own during its import, kernels' during the import of
their modules. So this file imports Triton with ``TRITON_INTERPRET=1`` before any test module does, and fails if Triton
is already imported. The variable is removed at once: processes started by other tests must compile normally. Tests that
need the compiler (ahead-of-time compilation) run in a separate process, `outside.py`.

On a GPU (`on_gpu.py`) this compiles and runs them; the same command continues a run that the time limit ended:

    export MOE_TEST_GPU=1
    python -m pytest --processes 16 --timeout 90 --session-timeout 540 --results FILE tests/kernels/triton

``python -m benchmarks.gpu_suite`` has a case of each form that models launch, with its time (`test_gpu_cases.py`).
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.examples import FACTOR
from tests.fork_server import ForkServer
from tests.kernels.triton import on_gpu

collect_ignore_glob: list[str] = []

ON_THE_HOST = (
    "all_reduce", "aot", "aot_table", "bookkeeping", "compile_command", "compile_drafts", "dependent", "gpu_cases",
    "launch_checks", "prefetch", "symm_mem_kernels",
)  # fmt: skip
"""Tests of the compiler, of the interpreter, of addresses, and of memory that several ranks write."""

if find_spec("triton") is None:
    collect_ignore_glob.append("test_*.py")
elif on_gpu.GPU in os.environ:
    collect_ignore_glob += [f"test_{name}.py" for name in ON_THE_HOST]
    on_gpu.require()
    on_gpu.install()
else:
    if "triton.language" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before these tests: import it in functions, or set TRITON_INTERPRET=1")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"

    from triton import knobs

    from tests.kernels.triton import interpreter

    interpreter.install()
    if before is None:
        del os.environ["TRITON_INTERPRET"]
        propagate, knobs.propagate_env = knobs.propagate_env, False
        knobs.runtime.interpret = True  # for modules of kernels, imported later
        knobs.propagate_env = propagate


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU: a case of each test function first, then the others, whose kernels' other forms are compiled. Each
    function is a unit of its own, so that the compilations of long files are distributed too."""
    if on_gpu.GPU not in os.environ:
        return
    seen: set[tuple[object, object]] = set()
    for item in items:
        unit = item.path, getattr(item, "originalname", item.name)
        item.unit = (*unit, unit in seen)  # type: ignore[attr-defined]
        seen.add(unit)
    items.sort(key=lambda item: item.unit[-1])  # type: ignore[attr-defined]


_HERE = "tests.kernels.triton."
COMPILING = ForkServer(
    {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
    (
        "triton.compiler",
        f"{_HERE}outside",
        f"{_HERE}outside_experts",
        f"{_HERE}outside_production",
        f"{_HERE}outside_suite",
        f"{_HERE}outside_symm_mem",
        "benchmarks.aot_table",
    ),
)  # fmt: skip


@pytest.fixture(scope="session")
def compiling() -> ForkServer:
    """Forks processes outside the interpreter, in which Triton and its compiler are imported."""
    return COMPILING


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Uninitialized memory holds NaN."""
    from tests.kernels.triton.poison import poisoned_memory

    with poisoned_memory():
        yield


@pytest.fixture(autouse=True)
def checked(poisoned: None) -> Iterator[None]:
    """Of one test in four, drawn in each run: the memory accesses of all launches are checked, which takes time."""
    if on_gpu.GPU in os.environ or (FACTOR == 1 and random.randrange(4)):
        yield
        return
    from tests.kernels.triton.memory_check import checked_accesses

    with checked_accesses():
        yield
