"""One seed for all random values of tests, from the module `random`, torch and Hypothesis: new in each run, shown with
each failure, and repeatable.

``MOE_TEST_SEED=N python -m pytest ...`` repeats the values of the run with seed N, also for a single test: each test
and each fixture has its own sequence. Processes started by a test get a number from it. The second attempt at a failed
test (``--reruns 1``) has new values; the summary shows the seed of the first attempt.
"""

from __future__ import annotations

import os
import random
import sys

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

NAME = "MOE_TEST_SEED"
os.environ.setdefault(NAME, str(random.SystemRandom().randrange(1 << 32)))


def seed() -> str:
    """Of this process. Worker processes inherit it; a forked process may have another one than its fork server."""
    return os.environ[NAME]


# Hypothesis would also draw constants of the modules that are imported at the time: others in the whole suite than in
# the run of a single test
providers.is_local_module_file = lambda path: False


def pytest_report_header() -> str:
    return f"{NAME}={seed()}"


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    name = f"{request.node.nodeid} {fixturedef.argname} {getattr(request, 'param_index', 0)}"
    _start(f"{seed()} {name}{_attempt(request._pyfuncitem)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    of_test = f"{seed()} {item.nodeid}{_attempt(item)}"
    _start(of_test)
    if isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.function):
        hypothesis.seed(of_test)(item.function)


def _start(of_test: str) -> None:
    """Starts the sequences of the module `random` and of torch's default generator, if the process has torch."""
    random.seed(of_test)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(random.Random(of_test).getrandbits(63))


def _attempt(item: pytest.Item) -> str:
    """Suffix of the sequence for an attempt; empty for the first attempt."""
    count = getattr(item, "execution_count", 1) + getattr(item, "deaths", 0)
    return f" {count}" if count > 1 else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report = yield
    if report.failed:
        report.sections.append(("random seed", f"{NAME}={seed()} repeats it"))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("rerun"):
        crash = getattr(report.longrepr, "reprcrash", None)
        words = report.longreprtext if crash is None else f"{crash.message.splitlines()[0]:.300}"
        terminalreporter.write_line(f"RERUN {report.nodeid} ({NAME}={seed()} repeats it): {words}")
