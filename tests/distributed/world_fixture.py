"""Fixtures of ranks that live as long as a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.dispatch.ranks import World


def world_of(*sizes: Any) -> Any:
    """A fixture: a `World` of each size."""

    @pytest.fixture(scope="module", params=sizes)
    def world(request: pytest.FixtureRequest) -> Iterator[World]:
        made = World(request.param)
        yield made
        made.close()

    return world
