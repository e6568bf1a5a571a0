"""Result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """`text`: the finding, the problem, or the reason why the check was skipped. `fix`: the fix of a problem."""

    name: str
    status: Literal["ok", "problem", "skipped"]
    text: str
    fix: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.name}: {self.text}" + (f"; {self.fix}" if self.fix else "")


def ok(name: str, text: str) -> Check:
    return Check(name, "ok", text)


def problem(name: str, text: str, fix: str) -> Check:
    return Check(name, "problem", text, fix)


def skipped(name: str, reason: str) -> Check:
    return Check(name, "skipped", reason)
