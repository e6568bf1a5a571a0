"""The Pareto front of a search as a picture: tokens a second of a GPU over tokens a second of a user."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_engine.errors import ConfigError
from moe_engine.tuning.planner.search import Point

SUFFIXES = (".svg", ".png")


def check_plot(path: Path) -> None:
    """Raises ConfigError before the search: another suffix, no folder, no matplotlib."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in .svg or .png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: no such folder {path.parent}; create it")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(f"--plot {path}: matplotlib is not installed; pip install matplotlib") from None


def plot_front(front: Sequence[Point], title: str, path: Path) -> None:
    """Writes the picture; each form of parallelism has its own marker color."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    users = [1 / prediction.tpot_s for _, prediction in front]
    axes.plot(users, [prediction.output_per_gpu for _, prediction in front], color="0.75", zorder=1)
    forms: dict[str, list[tuple[float, float]]] = {}
    for setup, prediction in front:
        forms.setdefault(setup.text, []).append((1 / prediction.tpot_s, prediction.output_per_gpu))
    for name, points in forms.items():
        axes.scatter([x for x, _ in points], [y for _, y in points], label=name, s=18, zorder=2)
    axes.set(xlabel="output tok/s of a user", ylabel="output tok/s of a GPU", title=title, xscale="log", yscale="log")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=6)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written ({error.strerror}); give another path") from None
