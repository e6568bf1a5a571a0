"""Report of a check: a table, the failures, and OK or NOT OK as the last line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

HEADER = ("node", "rank", "cores", "memory", "slowest link", "engine", "status")


class Finding(msgspec.Struct):
    """Result of one step on one node.

    Attributes:
        cells: of its row, by column.
        problems: each fails the check.
        address: ``IP:PORT`` where the node echoes blocks, in the first step.
    """

    cells: dict[str, str] = {}
    problems: list[str] = []
    address: str = ""


class Report:
    """Findings of all nodes, on node 0."""

    def __init__(self, names: Sequence[str]) -> None:
        blank = dict.fromkeys(HEADER, "-") | {"engine": "not run", "status": "ok"}
        self.rows = [blank | {"node": name, "rank": str(rank)} for rank, name in enumerate(names)]
        self.problems: list[str] = []

    def add(self, ranks: Iterable[int], findings: Mapping[int, Finding], absent: str) -> None:
        """Args: absent: the problem of a rank in `ranks` without a finding."""
        for rank in ranks:
            row = self.rows[rank]
            found = findings.get(rank, Finding(problems=[f"{row['node']}: {absent}"]))
            row.update(found.cells)
            if found.problems:
                row["status"] = "FAILED"
                self.problems += found.problems

    def text(self) -> str:
        cells = [HEADER, *(tuple(row.values()) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
        lines += [f"FAILED {problem}" for problem in self.problems]
        count = len(self.problems)
        return "\n".join([*lines, f"NOT OK: {count} problem{'s' if count > 1 else ''}" if count else "OK"])
