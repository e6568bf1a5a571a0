"""The compiled library in the forms that this machine can run; tests are skipped with the reason if it cannot be
built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copy

import pytest
import torch

from moe_engine.kernels.cpu.library import Library, LibraryError, load
from moe_engine.kernels.device import cpu_device
from tests.kernels.cpu.formulas import DTYPES


def _load(**options: object) -> Library:
    try:
        return load(**options)  # type: ignore[arg-type]
    except LibraryError as error:
        pytest.skip(f"no CPU library here: {error}")


@pytest.fixture(scope="session")
def library() -> Library:
    """The library as loaded by the engine."""
    return _load()


def _other(machine: str) -> object:
    return pytest.param(machine, marks=pytest.mark.one_of("other machines", machine))


TILES = "amx_bf16" in cpu_device().cpu_flags
OTHERS = ("no tiles" if TILES else "AMX emulated", "AVX2")
"""Each run has one of them. Emulated tiles take forty CPU seconds."""
MORE = [pytest.param("AMX emulated", marks=pytest.mark.exhaustive)] if TILES else []


def without_tiles(library: Library, folder: Path) -> Library:
    """The same library without tiles: its switch is of a loaded file, so another file."""
    return Library(Path(copy(library.file, folder / "without_tiles.so")), amx=False)


@pytest.fixture(scope="session", params=["this machine", *map(_other, OTHERS), *MORE])
def any_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Also code paths of other machines that can run here. With emulated tiles few units differ from the engine's
    library; for AVX2 all do, and are compiled with little optimization."""
    if request.param == "no tiles":
        return without_tiles(_load(), tmp_path_factory.mktemp("library"))
    if request.param == "AMX emulated":
        return _load(defines=("MOE_AMX_EMULATE",), amx=True)
    if request.param == "AVX2":
        import platform

        if platform.machine() != "x86_64":
            pytest.skip("not an x86-64 machine")
        return _load(march="x86-64-v3", optimize="-O1")
    return _load()


@pytest.fixture(params=DTYPES, ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
