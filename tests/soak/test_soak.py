"""A short soak of two data-parallel replicas with drafts: every answer must be the known one.

Longer soaks of all parallel forms: ``python -m tests.soak.run --requests 20000``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess
from tests.soak.run import COMMON, FORMS, TIGHT, Plan, reference, soak, verdicts

pytestmark = pytest.mark.usefixtures("forked_processes")

SEED = 20261122


def test_mixed_clients_get_right_answers(tmp_path: Path) -> None:
    bank = reference(tmp_path, 30, SEED)
    with ServerProcess(tmp_path, *COMMON, *TIGHT, *FORMS["dp"], *FORMS["speculation"]) as server:
        result = soak(server, bank, Plan(120, num_clients=16, seed=SEED))
    short = [name for name, fine in verdicts(result).items() if not fine]
    assert not short, (short, result["problems"], result["neighbor_problems"], result["pool"])
    assert result["requests"] >= 120
