"""Workers of this process start without steps of every size, and with short prompts in the others. Those steps compile
kernels on a real GPU; interpreted kernels need no compilation, and these steps are most of the computation of an engine
on a simulated device.

`tests/worker/test_before_ready.py` tests them; engines of `on_device` that call `sometimes_warm` run them in a third of
the runs.
"""

from __future__ import annotations

import pytest

from moe_engine.worker.startup import build_runner

SHORT = 4
"""Tokens of a prompt."""
_num_tokens, _warm_sizes = build_runner.NUM_TOKENS, build_runner.warm_sizes
build_runner.NUM_TOKENS = SHORT
build_runner.warm_sizes = lambda runner, num_tokens, top_k: 0


def start_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of the test start as on a real GPU."""
    monkeypatch.setattr(build_runner, "NUM_TOKENS", _num_tokens)
    monkeypatch.setattr(build_runner, "warm_sizes", _warm_sizes)


def starts_whole() -> bool:
    return build_runner.warm_sizes is _warm_sizes
