"""Simulated devices refuse what devices refuse, and notice what devices would not tell."""

from __future__ import annotations

import pytest

from tests.simulated_cuda.install import why_not
from tests.simulated_cuda.test_engine import outside

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def test_every_rule_holds() -> None:
    found = outside("outside_rules")
    broken = {name: text for name, text in found.items() if text is not None}
    assert len(found) >= 10 and not broken, "\n".join(broken.values())
