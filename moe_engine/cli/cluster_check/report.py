"""Report of a check: a table, the failures, and OK or NOT OK as the last line."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_engine.cli.cluster_check.wire import NodeFacts
from moe_engine.planning.ledger import gb

HEADER = ("node", "rank", "cores", "memory", "slowest link", "engine", "status")


@dataclass
class NodeReport:
    """One node. `problems` fail the check; `rank` is its rank in the trial engine, which has one per node."""

    rank: int
    host: str
    facts: NodeFacts | None = None
    slowest_link: float | None = None
    """Slowest round trip started by this node, in seconds."""
    bad_link: bool = False
    """A link from or to it failed; the end at fault is unknown."""
    engine: str = "not run"
    """How its part of the engine exited, in a word or two."""
    engine_failed: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.host or f"node {self.rank}"


@dataclass
class Report:
    """`problems`: those that do not belong to a single node."""

    nodes: list[NodeReport]
    problems: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """The last log lines of a failed part of the engine."""
    log_of: str = ""
    """The node that wrote them."""

    @property
    def ok(self) -> bool:
        return not self.problems and not any(node.problems for node in self.nodes)

    def text(self) -> str:
        rows = [HEADER, *(_row(node) for node in self.nodes)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        if self.log:
            lines += [f"The engine's last lines on {self.log_of}:", *(f"    {line}" for line in self.log)]
        failures = self.problems + [f"{node.name}: {text}" for node in self.nodes for text in node.problems]
        lines += [f"FAILED {text}" for text in failures]
        lines.append("OK" if self.ok else f"NOT OK: {len(failures)} problem{'s' if len(failures) > 1 else ''}")
        return "\n".join(lines)


def _row(node: NodeReport) -> tuple[str, ...]:
    facts = node.facts
    cores, memory = (str(facts.cores), gb(facts.available_bytes)) if facts else ("-", "-")
    link = "-" if node.slowest_link is None else f"{node.slowest_link * 1000:.1f} ms"
    status = "FAILED" if node.problems else "bad link" if node.bad_link else "see below" if node.engine_failed else "ok"
    return node.name, str(node.rank), cores, memory, link, node.engine, status
