from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.sandbox import Sandbox, why_not


def _sandbox(nodes: int, slurmd_timeout: int) -> Iterator[Sandbox]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    sandbox = Sandbox(nodes, slurmd_timeout)
    try:
        yield sandbox
    finally:
        sandbox.stop()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Sandbox]:
    """Three nodes of a SLURM that detects a lost node within seconds."""
    yield from _sandbox(3, slurmd_timeout=2)


@pytest.fixture
def slow_cluster() -> Iterator[Sandbox]:
    """Two nodes of a SLURM that needs a minute to detect a lost node; most clusters need longer."""
    yield from _sandbox(2, slurmd_timeout=60)
