"""Time limits of child processes: a process that gets no processor is not late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_engine.processes import frame_child
from moe_engine.processes.frame_child import FrameChild

SECONDS = 0.1


@pytest.fixture
def child() -> Iterator[FrameChild]:
    child = FrameChild("tests.server.waiting_child")
    assert child.exchange(b"start", 120.0) == b"start"
    yield child
    child.kill()


def test_only_time_in_which_a_process_computes_makes_it_late(child: FrameChild) -> None:
    assert child.exchange(b"sleep", SECONDS) == b"sleep"
    assert child.exchange(b"compute", SECONDS) is None and not child.is_starved


def test_the_wait_for_a_processor_has_a_limit(child: FrameChild, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_child, "STARVED_SECONDS", SECONDS)
    assert child.exchange(b"sleep", SECONDS) is None and child.is_starved
