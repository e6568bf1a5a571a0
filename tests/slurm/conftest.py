from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.sandbox import Sandbox, why_not


def _sandbox(nodes: int) -> Iterator[Sandbox]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    sandbox = Sandbox(nodes)
    try:
        yield sandbox
    finally:
        sandbox.stop()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Sandbox]:
    """Three nodes, which no test of a file loses."""
    yield from _sandbox(3)


@pytest.fixture
def losing_cluster() -> Iterator[Sandbox]:
    """Two nodes, of which the test may lose one."""
    yield from _sandbox(2)
