"""The report as text: tables and a character heat map, colored if the terminal supports it.

Legend: L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_engine.cli.experts_report.dumps import ExpertCounts
from moe_engine.cli.experts_report.statistics import LayerStatistics
from moe_engine.parallel.placement.gain import Gain

SHADES = " ·░▒▓█"
LIMITS = (0.25, 0.75, 1.5, 3.0, 6.0)
"""Multiples of the layer's mean at which the next shade starts."""
COLORS = ("grey35", "grey50", "green", "yellow", "dark_orange", "red")


def summary(counts: ExpertCounts, layers: Sequence[LayerStatistics]) -> str:
    """Two lines: the data read, and its overall imbalance."""
    passes, num_layers, experts = counts.passes.shape
    ranks = "" if counts.num_ranks is None else f" of {counts.num_ranks} rank{'s' * (counts.num_ranks > 1)}"
    worst = max(layers, key=lambda layer: layer.imbalance)
    return (
        f"{passes} passes{ranks} (mode {counts.mode}); {len(layers)} MoE layers of {num_layers}, {experts} experts; "
        f"{int(counts.passes.sum())} expert choices\n"
        f"busiest expert / mean: {np.mean([layer.imbalance for layer in layers]):.2f} on average, "
        f"{worst.imbalance:.2f} in layer {worst.layer}"
    )


def layer_table(layers: Sequence[LayerStatistics]) -> Table:
    """One row per MoE layer."""
    table = Table(title="Experts by layer", title_justify="left")
    for name in ("layer", "choices", "max/mean", "idle", "top 10 %", "top 25 %"):
        table.add_column(name, justify="right")
    table.add_column("hottest experts (share of choices)", no_wrap=True)
    for layer in layers:
        table.add_row(
            str(layer.layer),
            str(layer.choices),
            Text(f"{layer.imbalance:.2f}", style=COLORS[_shade(layer.imbalance)]),
            str(layer.num_idle),
            f"{layer.top10:.1%}",
            f"{layer.top25:.1%}",
            "  ".join(f"{expert}: {share:.1%}" for expert, share in layer.hottest),
        )
    return table


def gain_table(gains: Sequence[Gain]) -> Table:
    """One row per layout: balancedness without EPLB, with EPLB, and with EPLB on unseen traffic."""
    caption = (
        "unseen: planned on the first half of the passes, evaluated on the second.  slowest rank: tokens against "
        "trivial"
    )
    if any(gain.planned < gain.trivial or gain.slowest > 1 for gain in gains):
        caption += (
            ".  Placements are planned on the sum of all passes and evaluated pass by pass: if passes differ from the "
            "sum, a placement can be worse than trivial"
        )
    table = Table(
        title="Gain of EPLB (balancedness: mean / max tokens of a rank, 1 is even)",
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for name in ("EP size", "nodes", "redundant", "slots/rank", "trivial", "EPLB", "unseen", "slowest rank"):
        table.add_column(name, justify="right")
    for gain in gains:
        layout = gain.layout
        table.add_row(
            *map(str, (layout.num_ranks, layout.num_nodes, layout.num_redundant, layout.slots_per_rank)),
            f"{gain.trivial:.3f}",
            f"{gain.planned:.3f}",
            "-" if gain.unseen is None else f"{gain.unseen:.3f}",
            f"{gain.slowest - 1:+.1%}",
        )
    return table


def heat_map(total: NDArray[np.int64], width: int) -> Text:
    """One line per MoE layer, one character per expert, or per several experts (the hottest of them).

    Args:
        total: [L, E].
        width: of the terminal, in characters.
    """
    layers = np.flatnonzero(total.any(axis=1))
    heat = total[layers] / total[layers].mean(axis=1, keepdims=True)
    per_cell = -(-heat.shape[1] // max(1, width - 8))
    padded = np.pad(heat, ((0, 0), (0, -heat.shape[1] % per_cell)))
    cells = padded.reshape(len(layers), -1, per_cell).max(axis=2)
    text = Text()
    for layer, row in zip(layers.tolist(), cells.tolist()):
        text.append(f"{layer:>5}  ")
        for value in row:
            text.append(SHADES[_shade(value)], style=COLORS[_shade(value)])
        text.append("\n")
    text.append(f"layer  {per_cell} experts per character; multiples of the layer's mean:")
    for index, shade in enumerate(SHADES):
        below = f"<{LIMITS[index]:g}" if index < len(LIMITS) else f">={LIMITS[-1]:g}"
        text.append(f" '{shade}' {below}", style=COLORS[index])
    return text


def _shade(value: float) -> int:
    return sum(value >= limit for limit in LIMITS)


def console() -> Console:
    """Standard output with the terminal's width; at least 120 columns for a pipe."""
    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=max(found.width, 120))
