"""Simulated devices refuse what devices refuse, and notice what devices would not tell."""

from __future__ import annotations

from tests.simulated_cuda.test_engine import outside


def test_every_rule_holds() -> None:
    found = outside("outside_rules")
    broken = {name: text for name, text in found.items() if text is not None}
    assert len(found) >= 10 and not broken, "\n".join(broken.values())
