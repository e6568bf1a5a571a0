"""The seed shown with a failure repeats a test's random values, and tests use no other source of them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
WITHOUT_ARGUMENTS = {"Random", "default_rng", "RandomState"}
FROM_NOWHERE = {"SystemRandom", "urandom", "time_ns", "randbits"}
DRAWN = """
import random
import pytest

@pytest.fixture(scope="module", params="ab")
def of_module(request):
    return random.random()

def test_before(of_module):
    random.random()

def test_it(of_module):
    print("drew", of_module, random.random())
    assert False
"""
EXAMPLES = """
import sys
import pytest
from hypothesis import given, strategies as st

@pytest.mark.parametrize("case", "ab")
@given(st.lists(st.integers() | st.floats() | st.text()))
def test_it(case, value):
    print("drew", ascii(value))
    assert len(value) < 4

class TestClass:
    @given(st.binary())
    def test_it(self, value):
        print("drew", value)
        assert len(value) < 4
"""


def draws(folder: Path, *arguments: str, seed: str | None = None) -> tuple[str, list[str]]:
    """The seed shown with failures, and the random values of their tests."""
    environment = {name: value for name, value in os.environ.items() if name != "MOE_TEST_SEED"}
    environment |= {"PYTHONPATH": str(TESTS.parent)} | ({} if seed is None else {"MOE_TEST_SEED": seed})
    command = [sys.executable, "-m", "pytest", "-p", "tests.random_seed", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [*command, f"--rootdir={folder}", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (shown,) = set(re.findall(r"MOE_TEST_SEED=(\d+) repeats it", done.stdout))
    return shown, re.findall(r"^drew (.*)$", done.stdout, re.MULTILINE)


def test_a_failure_shows_how_to_draw_again(tmp_path: Path) -> None:
    (tmp_path / "test_drawn.py").write_text(DRAWN)
    seed, drawn = draws(tmp_path, "test_drawn.py")
    assert len(drawn) == len(set(drawn)) == 2
    assert draws(tmp_path, "test_drawn.py::test_it", seed=seed) == (seed, drawn)
    assert set(draws(tmp_path, "test_drawn.py::test_it")[1]).isdisjoint(drawn)


def test_examples_are_drawn_again(tmp_path: Path) -> None:
    """In a process with other modules, whose constants Hypothesis would draw too."""
    (tmp_path / "test_drawn.py").write_text(EXAMPLES)
    (tmp_path / "constants.py").write_text(f"NUMBERS = {[10**9 + 7 * number for number in range(1000)]}")
    (tmp_path / "test_first.py").write_text("import constants\n")
    seed, drawn = draws(tmp_path, "test_first.py", "test_drawn.py")
    cases = [f"test_drawn.py::{name}" for name in ("test_it[a]", "test_it[b]", "TestClass::test_it")]
    again = [draws(tmp_path, case, seed=seed)[1] for case in cases]
    assert [example for examples in again for example in examples] == drawn and again[0] != again[1]
    assert draws(tmp_path, "test_drawn.py")[1] != drawn


def test_a_second_attempt_draws_anew(tmp_path: Path) -> None:
    (tmp_path / "test_drawn.py").write_text(DRAWN)
    seed, drawn = draws(tmp_path, "test_drawn.py::test_it", "--reruns", "1")
    first = draws(tmp_path, "test_drawn.py::test_it", seed=seed)[1]
    assert set(first) < set(drawn) and len(set(drawn)) == 2 * len(first)


def hidden_draws(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Calls whose result no seed repeats: (line, name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in FROM_NOWHERE or (name in WITHOUT_ARGUMENTS and not node.args and not node.keywords):
                yield node.lineno, name


@pytest.mark.parametrize("source", ["random.Random()", "np.random.default_rng()", "SEED = time.time_ns() % 1000"])
def test_a_hidden_draw_is_found(source: str) -> None:
    assert list(hidden_draws(ast.parse(source)))


def test_no_test_draws_what_no_seed_repeats() -> None:
    found = [
        f"{file.relative_to(TESTS)}:{line} {name}"
        for file in sorted(TESTS.rglob("*.py"))
        if file.name != "random_seed.py"
        for text in [file.read_text()]
        if any(f"{name}(" in text for name in (*FROM_NOWHERE, *WITHOUT_ARGUMENTS))  # few are worth parsing
        for line, name in hidden_draws(ast.parse(text))
    ]
    assert not found, "draw from the module `random`, or seed the generator with a number drawn there"


def test_a_second_attempt_has_new_examples() -> None:
    """Hypothesis would repeat a stored example, so that a rare one fails twice."""
    assert settings.default is not None and settings.default.database is None
