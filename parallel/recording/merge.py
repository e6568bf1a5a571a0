"""From the ranks' parts to what is written: counts summed pass by pass, each token once.

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
"""What `ExpertRecorder.dump_part` returns on one rank."""


def pack_counts(pass_ids: Sequence[int], counts: NDArray[np.int32]) -> dict[str, Any]:
    """counts [S, L, E] of those passes as plain values, in two bytes each where that is enough."""
    narrow = np.dtype(np.uint16 if counts.max(initial=0) < 1 << 16 else np.int32)
    data = counts.astype(narrow).tobytes()
    return {"pass_ids": list(pass_ids), "shape": list(counts.shape), "dtype": narrow.name, "counts": data}


def sum_parts(parts: Sequence[Part]) -> dict[str, Any]:
    """The content of a dump of the modes stat and stat_approx.

    Args:
        parts: of all ranks that count, at least one; passes of the same number are summed, whoever has recorded them.

    Returns:
        SGLang's: `rank`, `logical_count` int32 [S, L, E] and `average_utilization_rate_over_window`. S is the ring's
        length, passes oldest first and zeros behind them; of an endless buffer the passes recorded.
    """
    import torch

    numbers = sorted({number for part in parts for number in part["pass_ids"]})
    capacity = max(part["capacity"] for part in parts)
    if capacity != -1:
        numbers = numbers[-capacity:]
    place = {number: i for i, number in enumerate(numbers)}
    shape = parts[0]["shape"][1:]
    summed = np.zeros((len(numbers) if capacity == -1 else capacity, *shape), dtype=np.int32)
    for part in parts:
        counts = np.frombuffer(part["counts"], dtype=part["dtype"]).reshape(part["shape"])
        for number, of_pass in zip(part["pass_ids"], counts):
            if number in place:
                summed[place[number]] += of_pass
    utilization = next((part["utilization"] for part in parts if part["utilization"] is not None), None)
    return {
        "rank": 0,
        "logical_count": torch.from_numpy(summed),
        "average_utilization_rate_over_window": utilization,
    }


class DumpWriter:
    """Writes the dumps of a server. Counts that could not be written stay here and are part of the next dump.

    Args:
        directory: the operator's; made if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._unwritten: list[Part] = []

    def forget(self) -> None:
        """Recording starts anew: what could not be written is of no use any more."""
        self._unwritten = []

    def write(self, parts: Sequence[Part | None]) -> list[Path]:
        """Writes what the ranks had recorded; returns the files, those that ranks wrote themselves included.

        Raises:
            RecordingError: the file, or some rank's, could not be written. Nothing was lost: dump again.
        """
        counted = [part for part in parts if part is not None]
        paths = [Path(part["path"]) for part in counted if "path" in part]
        sums = self._unwritten + [part for part in counted if "counts" in part]
        if sums:
            self._unwritten = sums
            paths.append(write_dump(self._directory, sum_parts(sums), rank=None))
            self._unwritten = []
        for path in paths:
            logger.info("wrote the expert distribution to %s", path)
        errors = [f"rank {part['rank']}: {part['error']}" for part in counted if "error" in part]
        if errors:
            raise RecordingError("; ".join(errors))
        return paths
