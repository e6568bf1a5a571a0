"""The seed shown with a failure repeats a test's random values, and tests use no other source of them."""

from __future__ import annotations

import ast
import os
import random
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
import sys
import types
import pytest
from hypothesis import Phase, given, settings, strategies as st

GENERATOR = random.Random(1)  # in the place of torch's, whose import takes seconds
sys.modules["torch"] = types.SimpleNamespace(manual_seed=GENERATOR.seed)

@pytest.fixture(scope="module", params="ab")
def of_module(request):
    return request.param, random.random(), GENERATOR.random()

def test_before(of_module):
    random.random(), GENERATOR.random()

def test_it(of_module):
    print(f"drew test_it[{of_module[0]}]:", of_module[1:], random.random(), GENERATOR.random())
    assert False

@pytest.mark.parametrize("case", "ab")
@settings(phases=[Phase.generate])
@given(st.lists(st.integers() | st.floats() | st.text()))
def test_examples(case, value):
    print(f"drew test_examples[{case}]:", ascii(value))
    assert len(value) < 4

class TestClass:
    @given(st.binary())
    def test_it(self, value):
        print("drew TestClass::test_it:", value)
        assert len(value) < 4
"""
NAMES = ["test_it[a]", "test_it[b]", "test_examples[a]", "test_examples[b]", "TestClass::test_it"]


def draws(folder: Path, *arguments: str, seed: str | None = None) -> tuple[str, dict[str, list[str]]]:
    """The seed shown with failures, and the random values of each test."""
    environment = {name: value for name, value in os.environ.items() if name != "MOE_TEST_SEED"}
    environment |= {"PYTHONPATH": str(TESTS.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # most of the time
    environment |= {} if seed is None else {"MOE_TEST_SEED": seed}
    command = [sys.executable, "-m", "pytest", "-p", "tests.random_seed", "-p", "pytest_rerunfailures"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={folder}", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    (shown,) = set(re.findall(r"MOE_TEST_SEED=(\d+) repeats it", done.stdout))
    found: dict[str, list[str]] = {}
    for name, values in re.findall(r"^drew (\S+): (.*)$", done.stdout, re.MULTILINE):
        found.setdefault(name, []).append(values)
    return shown, found


def test_a_failure_shows_how_to_draw_again(tmp_path: Path) -> None:
    """In a process with other modules, whose constants Hypothesis would draw too; a test alone; a second attempt."""
    (tmp_path / "test_drawn.py").write_text(DRAWN)
    (tmp_path / "constants.py").write_text(f"NUMBERS = {[10**9 + 7 * number for number in range(1000)]}")
    (tmp_path / "test_first.py").write_text("import constants\n")
    seed, drawn = draws(tmp_path, "test_first.py", "test_drawn.py")
    assert sorted(drawn) == sorted(NAMES)
    assert drawn["test_it[a]"] != drawn["test_it[b]"] and drawn["test_examples[a]"] != drawn["test_examples[b]"]
    chosen = [random.choice(NAMES[:2]), random.choice(NAMES[2:])]
    alone = draws(tmp_path, *(f"test_drawn.py::{name}" for name in chosen), seed=seed)
    assert alone == (seed, {name: drawn[name] for name in chosen})
    _, others = draws(tmp_path, "test_drawn.py")
    assert all(others[name] != drawn[name] for name in NAMES)
    _, twice = draws(tmp_path, "test_drawn.py::test_it", "--reruns", "1", seed=seed)
    for name in NAMES[:2]:
        assert set(drawn[name]) < set(twice[name]) and len(set(twice[name])) == 2


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
