"""Evaluates `RULES` over windows -> findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol

from moe_engine.tuning.doctor.rules import RULES, Change, Rule
from moe_engine.tuning.doctor.window import Statistics


@dataclass(frozen=True)
class Cost:
    """Memory that a change costs, by the ledger. `num_bytes` None: unknown, `text` has the reason."""

    text: str
    num_bytes: int | None = None


class Costs(Protocol):
    def of(self, change: Change, statistics: Statistics) -> Cost | None:
        """None: a change without memory."""


@dataclass(frozen=True)
class Finding:
    """A rule that held, with its evidence. `windows`: (number in which it held, number of windows)."""

    name: str
    severity: str
    condition: str
    evidence: str
    line_number: int | None
    line: str | None
    flag: str
    value: Any
    effect: str
    memory: str | None
    memory_bytes: int | None
    source: str
    windows: tuple[int, int]


@dataclass
class Diagnosis:
    """Evaluates windows one by one, so that a long log is read as a stream."""

    costs: Costs | None = None
    num_windows: int = 0
    _held: dict[str, tuple[int, Statistics]] = field(default_factory=dict)
    _evaluated: dict[str, int] = field(default_factory=dict)

    def add(self, statistics: Statistics) -> None:
        self.num_windows += 1
        for rule in RULES:
            if (held := evaluate(rule, statistics)) is None:
                continue
            self._evaluated[rule.name] = self._evaluated.get(rule.name, 0) + 1
            if held:
                count, _ = self._held.get(rule.name, (0, statistics))
                self._held[rule.name] = (count + 1, statistics)

    def findings(self) -> list[Finding]:
        """Findings in the table's order, errors first. The evidence is from the last window in which the rule held."""
        found = [self._finding(rule, *self._held[rule.name]) for rule in RULES if rule.name in self._held]
        return sorted(found, key=lambda finding: ("error", "warning", "info").index(finding.severity))

    def without_facts(self) -> list[str]:
        """Rules that no window could evaluate."""
        return [rule.name for rule in RULES if rule.name not in self._evaluated]

    def _finding(self, rule: Rule, count: int, statistics: Statistics) -> Finding:
        change = rule.change(statistics)
        cost = self.costs.of(change, statistics) if self.costs is not None and change.flag else None
        number, text = statistics.lines.get(rule.line, (None, None))
        return Finding(
            name=rule.name,
            severity=rule.severity,
            condition=rule.condition,
            evidence=rule.evidence.format_map(_Fields(statistics)),
            line_number=number or None,
            line=text or None,
            flag=change.flag,
            value=change.value,
            effect=rule.effect,
            memory=cost.text if cost else None,
            memory_bytes=cost.num_bytes if cost else None,
            source=rule.source,
            windows=(count, self._evaluated[rule.name]),
        )


def evaluate(rule: Rule, statistics: Statistics) -> bool | None:
    """Whether the rule holds in a window; None: a fact that it needs is missing."""
    if any(value_of(statistics, name) is None for name in rule.needs):
        return None
    return bool(rule.holds(statistics))


def value_of(statistics: Statistics, path: str) -> Any:
    return reduce(getattr, path.split("."), statistics)


class _Fields(dict[str, Any]):
    """Fields of statistics for a template; a value that the log lacks is shown as ``?``."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def __missing__(self, name: str) -> Any:
        value = getattr(self._statistics, name)
        return _Unknown() if value is None else value


class _Unknown:
    def __format__(self, spec: str) -> str:
        return "?"


def worst(findings: Iterable[Finding]) -> int:
    """Exit code: 1 if a finding recommends a change, else 0."""
    return int(any(finding.severity != "info" for finding in findings))
