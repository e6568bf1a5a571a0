"""The location of the CUDA compiler, and the environment of the libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_engine.cli import doctor_libraries
from moe_engine.kernels.vendors import cuda_home


def cuda(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    nvcc = folder / "bin" / "nvcc"
    nvcc.touch()
    nvcc.chmod(0o755)
    return folder


def test_the_wheel_is_given_where_nothing_else_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, given, path, system = (cuda(tmp_path / name) for name in ("nvidia/cu13", "given", "path", "system"))
    monkeypatch.setattr(cuda_home, "_of_wheels", lambda: [wheel])
    nowhere = tmp_path / "nowhere"
    environ: dict[str, str] = {}
    cuda_home.provide(environ, nowhere)
    assert environ["CUDA_HOME"] == str(wheel)
    assert cuda_home.find({}, system) == system
    assert cuda_home.find({"PATH": str(path / "bin")}, system) == path
    assert cuda_home.find({"CUDA_PATH": str(given), "PATH": str(path / "bin")}, system) == given
    assert cuda_home.find({"CUDA_HOME": str(nowhere)}, system) is None  # libraries check no other place either
    monkeypatch.setattr(cuda_home, "_of_wheels", list)
    environ.clear()
    cuda_home.provide(environ, nowhere)
    assert not environ


def test_the_doctor_names_libraries_that_lack_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_gemm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cuda_home, "find", lambda: None)
    assert "nvidia-cuda-nvcc" in doctor_libraries.cuda_compiler()
    (problem,) = doctor_libraries.problems({})
    assert problem.startswith("no nvcc: DeepGEMM compile") and "CUDA_HOME" in problem
    monkeypatch.setattr(cuda_home, "find", lambda: tmp_path)
    assert doctor_libraries.problems({}) == []
