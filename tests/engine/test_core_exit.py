"""The end of a core's process."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from moe_engine.cluster import core_main


def test_a_core_without_standard_output_ends_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a shell that has closed it (`>&-`)."""
    context: Any = SimpleNamespace(destroy=lambda linger: None)
    monkeypatch.setattr(core_main.zmq.Context, "instance", lambda: context)
    monkeypatch.setattr(sys, "stdout", None)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    core_main._leave(None, 3)
    assert codes == [3]
