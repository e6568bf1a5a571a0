"""The CUDA compiler, which DeepEP, DeepGEMM and FlashInfer run at first use: from the system or from its wheel.

The libraries look at CUDA_HOME, PATH and /usr/local/cuda. The wheel `nvidia-cuda-nvcc` is in none of these.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import MutableMapping
from pathlib import Path

VARIABLES = ("CUDA_HOME", "CUDA_PATH")
SYSTEM = Path("/usr/local/cuda")
INSTALL = "pip install 'nvidia-cuda-nvcc>=13,<14', or set CUDA_HOME"


def find(environ: MutableMapping[str, str] = os.environ, system: Path = SYSTEM) -> Path | None:
    """The CUDA folder with bin/nvcc, in the order of the libraries; the wheel's last."""
    given = [Path(environ[name]) for name in VARIABLES if environ.get(name)]
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    found = [Path(on_path).parent.parent] if on_path else []
    folders = given or [*found, system, *_of_wheels()]
    return next((folder for folder in folders if (folder / "bin" / "nvcc").exists()), None)


def provide(environ: MutableMapping[str, str] = os.environ, system: Path = SYSTEM) -> None:
    """Sets CUDA_HOME if the libraries would otherwise find no compiler."""
    if not any(environ.get(name) for name in VARIABLES) and (folder := find(environ, system)) is not None:
        environ["CUDA_HOME"] = str(folder)


def _of_wheels() -> list[Path]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except ValueError:
        return []
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return [path for folder in folders for path in sorted(Path(folder).glob("cu[0-9]*"), reverse=True)]
