"""Tests of simulated devices fail if a requirement is missing, unless they are skipped by name."""

from __future__ import annotations

import pytest

from tests.simulated_cuda import install


def test_a_missing_part_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match=r"g\+\+.*MOE_SKIP_SIMULATED_CUDA=1"):
        install.require()
    monkeypatch.setenv(install.SKIP, "1")
    with pytest.raises(pytest.skip.Exception, match="MOE_SKIP_SIMULATED_CUDA is set"):
        install.require()
