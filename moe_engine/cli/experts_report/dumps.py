"""Reads dumps of the expert recorder (this engine's and SGLang's) into counts by pass, layer and expert.

Legend: S passes, L layers, E logical experts, P physical experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.torch_file import load_tensors

RECORD_HINT = (
    "record with /start_expert_distribution_record, send requests, then /dump_expert_distribution_record on a server "
    "started with --expert-distribution-recorder-mode stat"
)


@dataclass(frozen=True)
class ExpertCounts:
    """Tokens per expert.

    Args:
        passes: int64 [S, L, E], without empty passes.
        mode: ``stat``, ``per_pass`` or ``per_token``.
        num_ranks: number of ranks whose records were merged; None if the file holds the sum of all.
    """

    passes: NDArray[np.int64]
    mode: str
    num_ranks: int | None = None

    @property
    def total(self) -> NDArray[np.int64]:
        """[L, E]"""
        return self.passes.sum(axis=0)


def read_dumps(paths: Sequence[str]) -> ExpertCounts:
    """The counts of one or several files: consecutive dumps, or one dump's files by rank.

    Raises:
        ConfigError: names the file and the fix.
    """
    loaded = [(path, _load(Path(path))) for path in paths]
    kinds = {path: "records" if "records" in data else "logical_count" for path, data in loaded}
    if len(set(kinds.values())) > 1:
        listed = "; ".join(f"{path} holds {kind}" for path, kind in kinds.items())
        raise ConfigError(f"dumps of different modes cannot be joined, report them one by one: {listed}")
    counts = _from_records(loaded) if "records" in kinds.values() else _from_sums(loaded)
    if not len(counts.passes):
        raise ConfigError(f"{', '.join(paths)}: nothing was recorded; {RECORD_HINT}")
    return counts


def _load(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        found = sorted(file.name for file in path.glob("expert_distribution_recorder_*.pt"))
        listed = f"name one of its dumps: {', '.join(found[-3:])}" if found else f"it holds no dumps; {RECORD_HINT}"
        raise ConfigError(f"{path}: is a folder; {listed}")
    try:
        data = load_tensors(path, str(path))
    except ConfigError as error:
        raise ConfigError(f"{error}; {RECORD_HINT}") from error
    if not isinstance(data, Mapping) or not {"logical_count", "records"} & set(data):
        raise ConfigError(f"{path}: holds neither logical_count nor records; {RECORD_HINT}")
    return data


def _from_sums(loaded: Sequence[tuple[str, Mapping[str, Any]]]) -> ExpertCounts:
    parts = []
    for path, data in loaded:
        counts = _table(data["logical_count"], f"{path}: logical_count")
        counts = counts[None] if counts.ndim == 2 else counts
        if counts.ndim != 3:
            raise ConfigError(
                f"{path}: logical_count has shape {list(counts.shape)}; needed: [passes, layers, experts]"
            )
        parts.append(counts)
    _same_shape([(path, part.shape[1:]) for (path, _), part in zip(loaded, parts)])
    return ExpertCounts(_without_empty(np.concatenate(parts)), "stat")


def _from_records(loaded: Sequence[tuple[str, Mapping[str, Any]]]) -> ExpertCounts:
    """Sums the ranks of each pass; physical experts are mapped to logical ones by the map at the time of the dump."""
    by_pass: dict[int, NDArray[np.int64]] = {}
    seen: dict[tuple[int, int], str] = {}
    shapes = []
    per_token = False
    for path, data in loaded:
        table = _table(data.get("last_physical_to_logical_map"), f"{path}: last_physical_to_logical_map")
        shapes.append((path, (len(table), int(table.max()) + 1)))
        _same_shape(shapes)
        for record in data["records"]:
            try:
                key = (int(record["forward_pass_id"]), int(record["rank"]))
                physical = _table(record["global_physical_count"], f"{path}: global_physical_count")
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}: a record has a missing or invalid field: {error}; {RECORD_HINT}") from error
            if key in seen:
                raise ConfigError(f"{path}: pass {key[0]} of rank {key[1]} is in {seen[key]} too; name each dump once")
            seen[key] = path
            per_token |= "topk_ids_of_layer" in record
            if physical.shape != table.shape:
                raise ConfigError(
                    f"{path}: pass {key[0]} counts {list(physical.shape)}, its map is {list(table.shape)}"
                )
            logical = _to_logical(physical, table)
            by_pass[key[0]] = by_pass[key[0]] + logical if key[0] in by_pass else logical
    passes = [by_pass[number] for number in sorted(by_pass)]
    mode = "per_token" if per_token else "per_pass"
    stacked = np.stack(passes) if passes else np.zeros((0, *shapes[0][1]), dtype=np.int64)
    return ExpertCounts(_without_empty(stacked), mode, len({rank for _, rank in seen}))


def _to_logical(physical: NDArray[np.int64], table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Counts [L, P] through a map [L, P] (-1: an empty slot) -> [L, E]."""
    logical = np.zeros((len(table), int(table.max()) + 2), dtype=np.int64)  # last column: empty slots
    np.add.at(logical, (np.arange(len(table))[:, None], table), physical)
    return logical[:, :-1]


def _table(value: Any, name: str) -> NDArray[np.int64]:
    array = np.asarray(value)
    if array.dtype.kind not in "iuf" or array.ndim < 2 or not array.size:
        raise ConfigError(f"{name}: must be a table of counts")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ConfigError(f"{name}: holds values that are not finite numbers; {RECORD_HINT}")
    return array.astype(np.int64)


def _same_shape(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    first, expected = shapes[0]
    for path, shape in shapes:
        if shape != expected:
            raise ConfigError(
                f"{path} has {shape[0]} layers x {shape[1]} experts, {first} {expected[0]} x {expected[1]}: "
                "all dumps must be of one model"
            )


def _without_empty(passes: NDArray[np.int64]) -> NDArray[np.int64]:
    return passes[passes.any(axis=(1, 2))]
