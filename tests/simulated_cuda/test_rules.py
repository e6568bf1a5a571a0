"""Simulated devices refuse what devices refuse, and notice what devices would not tell."""

from __future__ import annotations

import pytest

from tests.simulated_cuda import install
from tests.simulated_cuda.test_engine import outside


def test_what_is_missing_is_a_failure_unless_it_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match=r"g\+\+.*MOE_SKIP_SIMULATED_CUDA=1"):
        install.require()
    monkeypatch.setenv(install.SKIP, "1")
    with pytest.raises(pytest.skip.Exception, match="MOE_SKIP_SIMULATED_CUDA is set"):
        install.require()


def test_every_rule_holds() -> None:
    found = outside("outside_rules")
    broken = {name: text for name, text in found.items() if text is not None}
    assert len(found) >= 10 and not broken, "\n".join(broken.values())
