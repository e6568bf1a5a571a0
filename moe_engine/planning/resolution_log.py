"""Log of the automatic decisions of resolving a configuration, with their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Decision:
    """A value that the user left open (or gave in an older spelling), its resolved value and the reason."""

    name: str
    value: Any
    reason: str


class Record:
    """Collects decisions while values are resolved, and remarks that the start logs."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.remarks: list[str] = []

    def note(self, name: str, value: T, reason: str) -> T:
        self.decisions.append(Decision(name, value, reason))
        return value

    def remark(self, text: str) -> None:
        self.remarks.append(text)
