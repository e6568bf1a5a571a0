"""Vendor libraries in ``moe-engine doctor``: which are installed, and whether they load."""

from __future__ import annotations

import subprocess
import sys

from moe_engine.kernels.vendors import cuda_home
from moe_engine.kernels.vendors.probe import LIBRARIES, Library

SECONDS_TO_LOAD = 120
"""Import timeout; a first import may compile or download kernels."""

BROKEN = "does not load"


def libraries(device_kind: str) -> dict[str, str]:
    """By library: ``missing`` with the install command, or what is installed, and with a GPU whether it loads.

    Loading runs in a subprocess: a broken build must not crash the doctor.
    """
    return {library.name: _verdict(library, device_kind == "cuda") for library in LIBRARIES}


def _verdict(library: Library, try_it: bool) -> str:
    found = library.installed()
    if found is None:
        return f"missing: {library.install}"
    if not try_it:
        return f"{found} is installed; it needs a GPU"
    error = _load_error(library)
    return f"{found} loads" if error is None else f"{found} {BROKEN}: {error}"


def _load_error(library: Library) -> str | None:
    """The last line of the import's error, or None."""
    code = (
        "from moe_engine.kernels.vendors import probe\n"
        "from moe_engine.parallel.dispatch.deepep.startup import preload_nvshmem\n"
        "preload_nvshmem()\n"
        f"next(x for x in probe.LIBRARIES if x.name == {library.name!r}).load()\n"
    )
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_LOAD)
    except subprocess.TimeoutExpired:
        return f"import not finished within {SECONDS_TO_LOAD} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def cuda_compiler() -> str:
    """The CUDA compiler that the libraries find, or how to install it."""
    folder = cuda_home.find()
    return f"missing: {cuda_home.INSTALL}" if folder is None else str(folder / "bin" / "nvcc")


def problems(found: dict[str, str]) -> list[str]:
    """Sentences about libraries that are installed but broken, or lack the CUDA compiler."""
    lines = [f"{name}: {text}; its kernels are not used" for name, text in found.items() if BROKEN in text]
    need = [library.name for library in LIBRARIES if library.compiles and library.installed() is not None]
    if need and cuda_home.find() is None:
        lines.append(f"no nvcc: {', '.join(need)} compile kernels at first use; {cuda_home.INSTALL}")
    return lines
