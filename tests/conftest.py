"""For all tests: one computing thread a process, because two test processes share the cores, and spinning threads that
wait for each other on a busy machine are slower than one. Tests of threading set their own counts.
"""

from __future__ import annotations

import os

import pytest

from tests.random_seed import (  # noqa: F401
    pytest_fixture_setup,
    pytest_report_header,
    pytest_runtest_call,
    pytest_runtest_makereport,
)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the servers the tests start


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` skip, with the reason, where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch sees none")
    for item in marked:
        item.add_marker(skip)
