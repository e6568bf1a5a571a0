"""Pytest on simulated devices: ``pytest -p tests.simulated_cuda.plugin -m gpu tests``. Ranks and engines in processes
of their own have simulated devices only with the variables of `conftest.DEVICES`."""

from __future__ import annotations

import pytest

from tests.simulated_cuda.install import install

install()

NEEDS_A_GPU = {
    "test_ranks_in_one_process_on_streams_of_their_own": "a simulated kernel ends before the next begins: it cannot "
    "wait for one",
}
"""Tests that simulated devices cannot run, with the reason. (Ranks in separate processes do wait for each other; four
take minutes here.)"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if why := NEEDS_A_GPU.get(item.name.partition("[")[0]):
            item.add_marker(pytest.mark.skip(reason=f"needs a real GPU: {why}"))
