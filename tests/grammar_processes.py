"""Processes that check grammars, shared by the frontends of a test process: each costs a CPU second to start."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from moe_engine.frontend import grammar_checks
from moe_engine.frontend.grammar_checks import CheckChild
from moe_engine.processes.frame_child import FrameChildren
from moe_engine.structured_output.check_process import CheckSpec


class KeptChildren(FrameChildren[CheckChild]):
    def close(self) -> None:
        """The processes serve the next frontend."""


@pytest.fixture(scope="session", autouse=True)
def shared_grammar_processes() -> Iterator[None]:
    pools: dict[bytes, KeptChildren] = {}

    def shared(spec: CheckSpec) -> KeptChildren:
        return pools.setdefault(pickle.dumps(spec), KeptChildren(lambda: CheckChild(spec)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_checks, "children_for", shared)
        yield
    for pool in pools.values():
        FrameChildren.close(pool)
