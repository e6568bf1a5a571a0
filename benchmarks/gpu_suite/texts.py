"""Text reports of the parts' results, complete or partial, and their summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu_suite import exchange, kernel_times, tokens
from benchmarks.report import table

Values = dict[str, Any]
MOST_NAMES = 4
"""Of the lines with the same reason in a summary."""


def part_text(name: str, values: Values) -> str:
    """Text of a part's result; failures first."""
    lines = [f"failed: {values['failed']}"] if "failed" in values else []
    if "restarts" in values:
        lines.append(f"restarted {values['restarts']} times, after lines that crashed the process")
    if "skipped" in values:
        lines.append(f"skipped: {values['skipped']}")
    elif set(values) - {"failed", "restarts", "seconds", "at", "only"}:
        lines.append(_TEXTS[name](values))
    return "\n".join(lines)


def summary(result: dict[str, Values]) -> str:
    """What failed and what is wrong, equal reasons once, then the targets: met, missed, not measured."""
    lines = []
    for name, values in result.items():
        if "failed" in values:
            lines.append(f"  part {name} failed: {_last_line(values['failed'])}")
        if values.get("left_out"):
            count = values["left_out"] if isinstance(values["left_out"], int) else len(values["left_out"])
            lines.append(f"  part {name}: no time left for {count}")
        found: dict[str, list[str]] = {}
        for line in values.get("lines", []):
            if why := _what_is_wrong(line):
                found.setdefault(why, []).append(f"{line['kernel']} with {line['row']}")
        if values.get("wrong") or found:
            lines.append(f"  part {name}: {values.get('wrong', 0)} wrong, {sum(map(len, found.values()))} lines")
        for why, names in found.items():
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            lines.append(f"  {name}: {', '.join(names[:MOST_NAMES])}{more}: {why}")
    targets = [target for values in result.values() for target in values.get("targets", [])]
    reached = [target for target in targets if target["reached"] is not None]
    missed = [target for target in reached if not target["met"]]
    met, untried = len(reached) - len(missed), len(targets) - len(reached)
    lines.append(f"targets: {met} met, {len(missed)} missed, {untried} not measured")
    lines += [f"  missed: {target['name']}: {target['reached']:.2f} of {target['wanted']:.2f}" for target in missed]
    return "\n".join(lines)


def _what_is_wrong(line: Values) -> str:
    """The reason of a kernel's line, or an empty text."""
    if "failed" in line and "kernel" in line:
        return _last_line(line["failed"])[:160]
    if not line.get("ok", True):
        worst = max(line["error"], line.get("error_beside", 0.0))
        lost = f", lost {line['lost']}" if line.get("lost") else ""
        return f"error {worst:.1e}, at most {line['bound']:.0e}{lost}"
    return ""


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), text)


def _aot(values: Values) -> str:
    text = f"{values['num_kernels']} kernels for sm_{values['arch']}, {values['cached']} of them cached, "
    text += f"{len(values['not_fit'])} with problems"
    text += f", no time left for {values['left_out']}" if values["left_out"] else ""
    return "\n".join([text, *values["failures"]])


def _parity(values: Values) -> str:
    cells = [(n["kernel"], n["row"], _error(n), "yes" if n["ok"] else "NO") for n in values["lines"]]
    notes = [f"{row}: {why}" for row, why in values["refused"].items()]
    if values.get("left_out"):
        notes.append(f"no time left for {len(values['left_out'])} cases, from {values['left_out'][0]} on")
    return "\n".join([table(("kernel", "row", "error", "holds"), cells), *notes])


def _error(line: Values) -> str:
    return f"{line['error']:.1e}" if "error" in line else line.get("failed") or line["not_served"]


def _profile(values: Values) -> str:
    classes = [(n, f"{c['us']:.0f}", f"{c['launches']:.0f}") for n, c in values["classes"].items()]
    head = f"step {values['step_us']:.0f} us, of which the device was busy {values['device_us']:.0f} us"
    first = [(n["kernel"][:70], f"{n['us']:.0f}", f"{n['share']:.0%}") for n in values["next"]]
    text = head + "\n" + table(("class", "us", "launches"), classes)
    return text + "\n" + table(("optimize next", "us", "of a step"), first)


def _fp8_layers(values: Values) -> str:
    cells = [
        (p["batch_size"], f"{p['layer_us']:.0f}", f"{p['layer_floor_us']:.0f}", f"{p['of_floor']:.2f}")
        for p in values["points"]
    ]
    return table(("batch", "us per layer", "floor us", "of floor"), cells)


def _engine(values: Values) -> str:
    latencies = [(p["batch_size"], p["median_decode_latency"]) for p in values.get("points", [])]
    lines = [(size, f"{seconds * 1e3:.2f}", f"{size / seconds:.0f}") for size, seconds in latencies]
    text = table(("batch", "ms per step", "tokens/s"), lines) if lines else ""
    if values.get("tokens", 0) < values.get("of_tokens", 0):
        text += f"stopped at the time limit, after {values['tokens']} of {values['of_tokens']} tokens"
    return text + "\n" + kernel_times.targets_text(values["targets"])


_TEXTS: dict[str, Callable[[Values], str]] = {
    "aot": _aot, "parity": _parity, "kernels": kernel_times.as_text, "tokens": tokens.as_text,
    "exchange": exchange.as_text, "decode": _engine, "offline": _engine, "profile": _profile, "fp8_layers": _fp8_layers,
}  # fmt: skip
