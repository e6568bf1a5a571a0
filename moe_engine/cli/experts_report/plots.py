"""Plots of the report as PNG files, with matplotlib (an optional dependency).

Legend: L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moe_engine.cli.experts_report.statistics import LayerStatistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(folder: Path, total: NDArray[np.int64], layers: Sequence[LayerStatistics]) -> list[Path]:
    """Writes ``heat_map.png`` and ``imbalance.png``; `total`: [L, E].

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the folder is not writable.
    """
    from matplotlib.figure import Figure

    used = [layer.layer for layer in layers]
    heat = total[used] / total[used].mean(axis=1, keepdims=True)
    figures = {"heat_map.png": _heat_map(Figure, heat, used), "imbalance.png": _imbalance(Figure, heat, layers)}
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=150)
    return [folder / name for name in figures]


def _heat_map(make: type[Figure], heat: NDArray[np.float64], layers: Sequence[int]) -> Figure:
    """Layers x experts, in multiples of the layer's mean."""
    figure = make(figsize=(12, max(3.0, 1.6 + 0.13 * len(layers))), layout="constrained")
    axes = figure.subplots()
    top = max(2.0, float(np.quantile(heat, 0.995)))  # clip outliers: a single hot expert must not darken all others
    image = axes.imshow(heat, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=top)
    step = max(1, len(layers) // 16)
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_title("Tokens of each expert, as a multiple of its layer's mean")
    figure.colorbar(image, ax=axes, extend="max", label="times the mean")
    return figure


def _imbalance(make: type[Figure], heat: NDArray[np.float64], layers: Sequence[LayerStatistics]) -> Figure:
    """Left: busiest expert / mean by layer. Right: cumulative share of the tokens of the busiest experts."""
    figure = make(figsize=(12, 4.2), layout="constrained")
    by_layer, coverage = figure.subplots(1, 2)
    by_layer.plot([layer.layer for layer in layers], [layer.imbalance for layer in layers], marker="o", markersize=3)
    by_layer.axhline(1, color="grey", linewidth=0.8, linestyle="--", label="even")
    by_layer.set_ylim(bottom=0)
    by_layer.set(xlabel="layer", ylabel="busiest expert / mean", title="Imbalance by layer")
    by_layer.legend()
    num_experts = heat.shape[1]
    shares = np.cumsum(-np.sort(-heat, axis=1), axis=1) / num_experts  # [L, E]
    x = np.arange(1, num_experts + 1) / num_experts
    coverage.fill_between(x, shares.min(axis=0), shares.max(axis=0), alpha=0.25, label="all layers")
    coverage.plot(x, np.median(shares, axis=0), label="median layer")
    coverage.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--", label="even")
    coverage.set(xlabel="part of the experts, busiest first", ylabel="share of the tokens", title="Coverage")
    coverage.legend(loc="lower right")
    return figure
