"""A diagnosis as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe_engine.tuning.doctor.diagnosis import Diagnosis, Finding, worst
from moe_engine.tuning.doctor.rules import RULES

MAX_LINE = 160


@dataclass(frozen=True)
class Report:
    """
    Attributes:
        source: the log or server that was read, for the first line.
        without_facts: rules that could not be evaluated.
        has_flags: the values of flags are known; False: a log without its beginning.
    """

    source: str
    engine: str
    findings: tuple[Finding, ...]
    without_facts: tuple[str, ...]
    num_lines: int = 0
    num_batches: int = 0
    num_broken: int = 0
    num_windows: int = 0
    has_flags: bool = True

    @property
    def exit_code(self) -> int:
        return worst(self.findings)

    def as_json(self) -> dict[str, Any]:
        return {
            **{
                name: value
                for name, value in asdict(self).items()
                if name not in ("findings", "without_facts", "has_flags")
            },
            "num_rules": len(RULES),
            "healthy": not self.exit_code,
            "findings": [asdict(finding) for finding in self.findings],
            "without_facts": list(self.without_facts),
        }

    def as_text(self) -> str:
        lines = [f"{self.source}: {_counts(self)}"]
        if not self.num_lines and not self.num_batches:
            return f"{lines[0]}: there was no load"
        for finding in self.findings:
            lines += ["", *text_of(finding)]
        held = {finding.name for finding in self.findings}
        good = [rule.name for rule in RULES if rule.name not in held and rule.name not in self.without_facts]
        lines += ["", f"no finding: {', '.join(good) or 'nothing'}"]
        if self.without_facts:
            why = "lines about it" if self.num_lines else "samples"
            lines.append(f"not evaluated, for lack of {why}: {', '.join(self.without_facts)}")
        if not self.has_flags:
            lines.append("the log has no server_args line: flags are unknown; give it from the start of the server")
        return "\n".join(lines)


def make_report(source: str, engine: str, diagnosis: Diagnosis, *, has_flags: bool = True, **counts: int) -> Report:
    return Report(
        source,
        engine,
        tuple(diagnosis.findings()),
        tuple(diagnosis.without_facts()),
        num_windows=diagnosis.num_windows,
        has_flags=has_flags,
        **counts,
    )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _counts(report: Report) -> str:
    parts = []
    if report.num_lines:
        broken = f", {report.num_broken} of them cut off" if report.num_broken else ""
        parts.append(f"{report.num_lines} lines{broken}, {report.num_batches} of batches")
        parts.append(_number(report.num_windows, "window"))
    else:
        parts.append(_number(report.num_batches, "sample"))
    asking = sum(finding.severity != "info" for finding in report.findings)
    parts.append(f"{asking} of {len(RULES)} rules recommend a change" if asking else "no rule recommends a change")
    return ", ".join(parts)


def change_of(finding: Finding) -> str:
    """``--flag value``; words for a flag to leave out, and for advice without a flag."""
    if not finding.flag:
        return finding.effect
    if finding.value is None:
        return f"leave out {finding.flag}"
    return finding.flag if finding.value is True else f"{finding.flag} {finding.value}"


def text_of(finding: Finding) -> Sequence[str]:
    count, of = finding.windows
    windows = f" (in {count} of {of} windows)" if of > 1 else ""
    lines = [f"{finding.severity.upper()} {finding.name}: {finding.condition}{windows}"]
    lines.append(f"  found    {finding.evidence}")
    if finding.line:
        number = f"line {finding.line_number}: " if finding.line_number else ""
        lines.append(f"           {number}{finding.line[:MAX_LINE]}")
    lines.append(f"  change   {change_of(finding)}")
    if finding.flag:
        lines.append(f"  effect   {finding.effect}")
    if finding.memory:
        lines.append(f"  memory   {finding.memory}")
    return [*lines, f"  source   {finding.source}"]
