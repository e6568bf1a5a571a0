"""A picture of a suite's result: each kernel against its floor, and the time profile of a decode step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = {"triton": "#2a6fbb", "torch": "#bbbbbb"}
VENDOR = "#d08030"


def draw(result: dict[str, Any], file: Path) -> Path | None:
    """Writes a PNG; None if matplotlib is not installed or nothing was measured."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [line for line in result.get("kernels", {}).get("lines", []) if "us" in line]
    classes = result.get("profile", {}).get("classes", {})
    if not lines and not classes:
        return None
    names = list(dict.fromkeys(line["kernel"] for line in lines))
    height = max(4.0, 0.18 * len(names))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, height), width_ratios=(3, 1))
    for line in lines:
        color = COLORS.get(line["row"], VENDOR)
        left.scatter(line["of_floor"], names.index(line["kernel"]), color=color, s=14, label=line["row"])
    left.set_yticks(range(len(names)), names, fontsize=6)
    left.invert_yaxis()
    left.axvline(0.85, color="#888888", linewidth=0.8)
    left.set_xlim(0, 1.05)
    left.set_xlabel("floor / time")
    seen = dict(zip(*reversed(left.get_legend_handles_labels())))
    left.legend(seen.values(), seen.keys(), loc="lower right", fontsize=7)
    right.barh(list(classes), [entry["us"] for entry in classes.values()], color=COLORS["triton"])
    right.invert_yaxis()
    right.set_xlabel("us in a decode step")
    first = result.get("profile", {}).get("next", [])
    right.set_title(
        "\n".join(f"{entry['share']:.0%} {entry['kernel'][:40]}" for entry in first), fontsize=7, loc="left"
    )
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return file
