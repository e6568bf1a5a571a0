"""Merges the ranks' parts of a dump: counts summed per pass, each token once.

Legend: S passes, L layers, E logical experts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_engine.parallel.recording.dump_file import RecordingError, write_dump

logger = logging.getLogger(__name__)

Part = Mapping[str, Any]
"""Result of `ExpertRecorder.dump_part` on one rank."""


def pack_counts(pass_ids: Sequence[int], counts: NDArray[np.int32]) -> dict[str, Any]:
    """counts [S, L, E] of those passes as plain values, in two bytes each if possible."""
    narrow = np.dtype(np.uint16 if counts.max(initial=0) < 1 << 16 else np.int32)
    data = counts.astype(narrow).tobytes()
    return {"pass_ids": list(pass_ids), "shape": list(counts.shape), "dtype": narrow.name, "counts": data}


def unpack_counts(part: Part) -> NDArray[Any]:
    """[S, L, E] of the passes of a part."""
    return np.frombuffer(part["counts"], dtype=part["dtype"]).reshape(part["shape"])


def sum_counts(parts: Sequence[Part]) -> dict[str, Any]:
    """Merges the parts of all counting ranks, at least one, into one part; passes with the same id are summed. A ring
    keeps the newest passes, oldest first."""
    numbers = sorted({number for part in parts for number in part["pass_ids"]})
    capacity = max(part["capacity"] for part in parts)
    if capacity != -1:
        numbers = numbers[-capacity:]
    place = {number: i for i, number in enumerate(numbers)}
    shape = parts[0]["shape"][1:]
    summed = np.zeros((len(numbers), *shape), dtype=np.int32)
    for part in parts:
        for number, of_pass in zip(part["pass_ids"], unpack_counts(part)):
            if number in place:
                summed[place[number]] += of_pass
    utilization = next((part["utilization"] for part in parts if part["utilization"] is not None), None)
    return {"rank": 0, "capacity": capacity, "utilization": utilization, **pack_counts(numbers, summed)}


def sum_parts(parts: Sequence[Part]) -> dict[str, Any]:
    """The content of a dump of the modes stat and stat_approx, from the parts of all counting ranks, see `sum_counts`.

    Returns:
        SGLang's: `rank`, `logical_count` int32 [S, L, E] and `average_utilization_rate_over_window`. S is the ring's
        length, passes oldest first, then zeros; for an unlimited buffer S is the number of recorded passes.
    """
    import torch

    whole = sum_counts(parts)
    counts = unpack_counts(whole).astype(np.int32)
    unused = max(0, whole["capacity"] - len(counts))
    padded = np.concatenate([counts, np.zeros((unused, *counts.shape[1:]), dtype=np.int32)])
    return {
        "rank": 0,
        "logical_count": torch.from_numpy(padded),
        "average_utilization_rate_over_window": whole["utilization"],
    }


def write_parts(directory: Path, parts: Sequence[Part | None]) -> list[Path]:
    """Writes the ranks' records; returns the files, those written by ranks included.

    Args:
        directory: the operator's; created if missing.

    Raises:
        RecordingError: the file, or some rank's, could not be written. The caller keeps the parts and passes them again
            with the next ones.
    """
    found = [part for part in parts if part is not None]
    paths = [Path(part["path"]) for part in found if "path" in part]
    counts = [part for part in found if "counts" in part]
    if counts:
        paths.append(write_dump(directory, sum_parts(counts), rank=None))
    for path in paths:
        logger.info("wrote the expert distribution to %s", path)
    errors = [f"rank {part['rank']}: {part['error']}" for part in found if "error" in part]
    if errors:
        raise RecordingError("; ".join(errors))
    return paths
