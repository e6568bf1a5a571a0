from __future__ import annotations

import pytest

from tests.simulated_cuda.install import require


@pytest.fixture(autouse=True, scope="session")
def devices() -> None:
    require()
