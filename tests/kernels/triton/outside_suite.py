"""The launches of the GPU suite on an H200 that is absent, outside the interpreter:
``python -m tests.kernels.triton.outside_suite DEVICE FOLDER``, with the device of a dry run, or none.

Prints the launches that reach kernels, and the kernels' names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.gpu_suite.launches import of_suite
from benchmarks.gpu_suite.setting import Setting
from moe_engine.kernels.triton.absent_device import listed
from moe_engine.tuning.hardware.table import find_gpu

ARCH = 90


def main() -> None:
    dry, folder = sys.argv[1], Path(sys.argv[2])
    names = set()
    with listed(ARCH) as needed:
        for name, launch in of_suite(
            folder, find_gpu("h200").machine(), Setting.of(None if dry == "none" else dry, 60)
        ):
            before = len(needed)
            launch()
            names |= {name} if len(needed) > before else set()
    print(json.dumps([sorted(names), sorted({kernel.rpartition(".")[2] for kernel, _ in needed})]))


if __name__ == "__main__":
    main()
