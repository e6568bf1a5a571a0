"""The tests of this folder run in a process with simulated devices only: that of `test_on_device.py`, or one that runs
nothing else (``pytest tests/simulated_cuda/on_device``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated_cuda.install import install, installed

FOLDER = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    asked = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if all(path.is_relative_to(FOLDER) for path in asked):
        install()


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if installed() else True
