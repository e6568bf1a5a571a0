"""Cold load of a checkpoint against a plain sequential read of its files: ``python -m benchmarks.cold_load``.

Each round drops the files from the page cache and reads them once from begin to end, drops them again and builds the
model from them. The ratio of the two rates is the share of the disk's rate that a load reaches; target 0.8. The last
column is the load with a warm page cache: if it is slower than the disk, the processor limits the load. Each round also
loads with one reading thread for each matrix, outside the page cache too: the second ratio is the gain of several.

    python -m benchmarks.cold_load --shape moe-390m --rounds 3
    python -m benchmarks.cold_load --model-path /models/Qwen3-0.6B --quantization int4
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import report
from benchmarks.checkpoints import SHAPES, ensure_checkpoint
from moe_engine.config.args import EngineArgs
from moe_engine.models import weights
from moe_engine.models.checkpoint.read_parts import SERIAL, PartReads
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.planning.prepare import prepare
from moe_engine.tuning.stats import median
from moe_engine.worker.startup.kernel_choice import build_backends

PART_BYTES = 8 << 20


def drop(paths: Sequence[Path]) -> None:
    """Removes files from the page cache, after their contents have reached the disk."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_plainly(paths: Sequence[Path]) -> float:
    """Seconds of one sequential read of each file."""
    buffer, began = bytearray(PART_BYTES), time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def load(config: Any, serial: bool = False) -> float:
    """Seconds until the model is built. `serial`: no matrix is read by several threads."""
    backends = build_backends(config.kernels.model)
    with patch.object(weights, "PartReads", (lambda count: SERIAL) if serial else PartReads):
        began = time.perf_counter()
        load_model(
            config.model_path, config.model, LoadOptions(config.dtype), backends, max_positions=config.context_len
        )
        return time.perf_counter() - began


def measure(config: Any, rounds: int) -> list[tuple[float, float, float, float]]:
    """(plain read, cold load, warm load, cold load with one reader a matrix) of each round, in seconds."""
    paths = sorted({file.path for file in read_checkpoint(Path(config.model_path)).values()})
    load(config)  # imports, and the kernels' library
    found = []
    for _ in range(rounds):
        drop(paths)
        plain = read_plainly(paths)
        drop(paths)
        cold = load(config)
        warm = load(config)
        drop(paths)
        found.append((plain, cold, warm, load(config, serial=True)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.command_parser("cold_load", __doc__)
    parser.add_argument("--shape", default="moe-390m", choices=sorted(SHAPES), help="random checkpoint of this shape")
    parser.add_argument("--model-path", help="a checkpoint instead")
    parser.add_argument("--directory", help="folder of the random checkpoint (default: the benchmarks' cache)")
    parser.add_argument("--quantization", help="int4 or int8: quantize while loading")
    parser.add_argument("--rounds", type=int, default=3)
    own = parser.parse_args(argv)
    path = Path(own.model_path) if own.model_path else ensure_checkpoint(own.shape, own.directory)
    asked = {"quantization": own.quantization} if own.quantization else {}
    config = prepare(EngineArgs.from_kwargs(model_path=str(path), device="cpu", random_seed=0, **asked))
    files = {file.path for file in read_checkpoint(Path(config.model_path)).values()}
    size = sum(file.stat().st_size for file in files) / 1e9
    found = measure(config, own.rounds)
    print(f"{size:.2f} GB in {len(files)} files; medians of {own.rounds} rounds, least and largest ratio in brackets")
    ratios, gains = [row[0] / row[1] for row in found], [row[3] / row[1] for row in found]
    plain, cold, warm = (median([row[i] for row in found]) for i in range(3))
    print(f"plain read {size / plain:.2f} GB/s   cold load {size / cold:.2f} GB/s   warm load {size / warm:.2f} GB/s")
    print(f"cold load / plain read: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), target 0.80")
    print(f"one reader a matrix / cold load: {median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
