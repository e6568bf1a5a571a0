"""One seed for what tests draw from the module `random`: fresh in each run, part of each failure, and repeatable.

``MOE_TEST_SEED=N python -m pytest ...`` draws again what the run with seed N drew, also for a test alone: each test and
each fixture has its own sequence. Processes that a test starts are given a number drawn here.
"""

from __future__ import annotations

import os
import random

import pytest

NAME = "MOE_TEST_SEED"
SEED = os.environ.setdefault(NAME, str(random.SystemRandom().randrange(1 << 32)))
"""The workers of pytest-xdist inherit it."""


def pytest_report_header() -> str:
    return f"{NAME}={SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    random.seed(f"{SEED} {request.node.nodeid} {fixturedef.argname} {getattr(request, 'param_index', 0)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    random.seed(f"{SEED} {item.nodeid}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report = yield
    if report.failed:
        report.sections.append(("random seed", f"{NAME}={SEED} repeats it"))
    return report
