"""Compiling and loading: reuse of the compiled library, one pool of threads, failures with a reason."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moe_engine.kernels.cpu import library as module
from moe_engine.kernels.cpu.library import Library, LibraryError, load
from moe_engine.kernels.device import Device
from tests.kernels.cpu.conftest import without_tiles
from tests.waiting import is_running, until

ONE_POOL = """
import torch
torch.set_num_threads(2)
x = torch.randn(256, 256)
x @ x
from moe_engine.kernels.linear.cpu import CpuLinear
linear = CpuLinear()
linear.run(x, linear.prepare(x))
(x @ x).sum()
files = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(*sorted({f for f in files if f.rsplit("/", 1)[-1].startswith(("libgomp", "libomp", "libiomp"))}))
"""


def test_loaded_once_and_found_again(library: Library) -> None:
    assert load() is library
    assert module._built([*module.FLAGS, "-O3", "-march=native"]) == library.file
    assert library.path in module.PATHS.values()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_one_openmp_runtime_in_the_process(library: Library) -> None:
    result = subprocess.run([sys.executable, "-c", ONE_POOL], capture_output=True, text=True, check=True, timeout=120)
    assert len(result.stdout.split()) == 1, result.stdout


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_device", lambda: Device("cpu", "a machine"))
    assert "compiler" in str(module._library_or_reason.__wrapped__("native", (), "-O3", True))


def test_an_error_of_the_compiler_is_the_reason(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error occurs once: the second caller gets the same reason without a new attempt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    march = f"no-such-machine-{tmp_path.name}"
    with pytest.raises(LibraryError, match="error"):
        load(march)
    monkeypatch.setattr(module, "_built", lambda flags: pytest.fail("compiled again"))
    with pytest.raises(LibraryError, match="error"):
        load(march)
    kept = [file.name for file in (tmp_path / "moe-engine").iterdir() if file.suffix != ".lock"]
    assert kept == []


FULL = """#!/bin/sh
case "$*" in *--version*|*c++-header*) exit 0 ;; esac
sleep 3600 > /dev/null 2>&1 &
echo $! >> {pids}
echo x > "$TMPDIR/cc1234.s"
case "$*" in *{unit}.cpp*)
  while [ "$(wc -l < {pids})" -lt 2 ]; do sleep 0.01; done
  echo "error: {unit}.o: No space left on device" >&2; kill $!; exit 1 ;;
esac
wait
"""
"""A compiler, with a process of its own as g++ has one, on a full disk; it fails while another runs."""


def test_a_full_disk_is_named_with_the_fix(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, pids = tmp_path / "c++", tmp_path / "pids"
    compiler.write_text(FULL.format(pids=pids, unit=module.UNITS[1]))
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(module, "cpu_device", lambda: Device("cpu", "a machine", compiler=str(compiler)))
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    with pytest.raises(LibraryError, match=f"{cache}/moe-engine is full: free space there, or set XDG_CACHE_HOME"):
        module._built([])
    assert [file.suffix for file in (cache / "moe-engine").iterdir()] == [".lock"]  # no temporary files
    started = pids.read_text().split()
    assert len(started) == 2
    until(lambda: not any(is_running(int(pid)) for pid in started), "processes of the compiler are left")


SLOW = """#!/bin/sh
case "$*" in *--version*|*c++-header*) exit 0 ;; esac
sleep 3600 > /dev/null 2>&1 &
echo $! $$ >> {pids}
wait
"""
COMPILE = """
import signal, sys
from moe_engine.kernels.cpu import library
from moe_engine.kernels.device import Device
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for a run in the background
library.cpu_device = lambda: Device("cpu", "a machine", compiler=sys.argv[1])
library._built(sys.argv[2:])
"""


def compiling(folder: Path, flags: str = "") -> tuple[subprocess.Popen[bytes], list[int]]:
    """A process that compiles with `SLOW`, and the processes of its compilers."""
    compiler, pids = folder / "c++", folder / f"pids{flags}"
    compiler.write_text(SLOW.format(pids=pids))
    compiler.chmod(0o755)
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    process = subprocess.Popen([sys.executable, "-c", COMPILE, str(compiler), flags], env=environ)
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2 * (os.cpu_count() or 1))
    return process, [int(pid) for pid in pids.read_text().split()]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_compiler_outlives_the_process(tmp_path: Path, how: signal.Signals) -> None:
    process, started = compiling(tmp_path)
    process.send_signal(how)
    process.wait()
    until(lambda: not any(map(is_running, started)), "processes of the compiler are left")


def test_the_next_compilation_removes_files_of_a_killed_one(tmp_path: Path) -> None:
    """And leaves those of a running one."""

    def folders() -> set[Path]:
        return set((tmp_path / "moe-engine").glob(f"*{module.BUILD}"))

    killed, _ = compiling(tmp_path, "-O1")
    (abandoned,) = folders()
    running, _ = compiling(tmp_path, "-O2")
    try:
        assert abandoned in folders() and len(folders()) == 2
        killed.kill()
        killed.wait()
        next_one, _ = compiling(tmp_path, "-O3")
        next_one.send_signal(signal.SIGINT)
        next_one.wait()
        (left,) = folders()
        assert left != abandoned
    finally:
        running.kill()
        running.wait()


QUICK = """#!/bin/sh
for argument; do
  case "$last" in -o) echo "$*" > "$argument" ;; -c) echo "$argument" >> {units} ;; esac
  last=$argument
done
"""
"""A compiler whose files are its commands."""


def test_only_changed_units_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, units, sources = tmp_path / "c++", tmp_path / "units", tmp_path / "src"
    compiler.write_text(QUICK.format(units=units))
    compiler.chmod(0o755)
    shutil.copytree(module.SOURCES, sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "cpu_device", lambda: Device("cpu", "a machine", compiler=str(compiler)))
    monkeypatch.setattr(module, "SOURCES", sources)

    def compiled(*flags: str) -> tuple[set[str], str]:
        units.write_text("")
        linked = module._built(list(flags)).read_text()
        return {Path(name).stem for name in units.read_text().split()}, linked

    every, first = compiled("-O1")
    assert every == {*module.UNITS} == {path.stem for path in sources.glob("*.cpp")}
    assert compiled("-O1") == (set(), first)
    assert compiled("-O2")[0] == every
    tiles, emulated = compiled("-O1", "-DMOE_AMX_EMULATE")
    assert tiles == {"gemm_bf16", "coded", "ops"}
    assert len(set(emulated.split()) - set(first.split())) == 1 + len(tiles)  # of the objects, and the library's name
    for name, users in (
        ("lora.cpp", {"lora"}),
        ("drafts.h", {"drafts", "draft_step", "decode_step"}),
        ("vec.h", every),
    ):
        (sources / name).write_text((sources / name).read_text() + "// changed")
        assert compiled("-O1")[0] == users


def test_a_cut_library_is_compiled_again(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a cache that was copied to a full disk: the process that loads it would end by SIGBUS, at each start."""
    compiler, whole = tmp_path / "c++", library.file.read_bytes()
    compiler.write_text(QUICK.format(units=tmp_path / "units"))
    compiler.chmod(0o755)
    monkeypatch.setattr(module, "cpu_device", lambda: Device("cpu", "a machine", compiler=str(compiler)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = module._built(["-O1"])
    commands = made.read_bytes()
    for size in (0, 40, len(whole) // 2, len(whole) - 1):
        made.write_bytes(whole[:size])
        assert module._built(["-O1"]).read_bytes() == commands
    made.write_bytes(whole)
    assert module._built(["-O1"]).read_bytes() == whole


def test_a_full_cache_is_named_before_the_compiler_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(flags: list[str]) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_built", full)
    with pytest.raises(LibraryError, match=f"{tmp_path}/moe-engine is full: free space there, or set XDG_CACHE_HOME"):
        load(f"a-machine-{tmp_path.name}")


def test_a_library_in_a_read_only_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose image has the library and whose file system is read-only: it was compiled again."""
    compiler, units = tmp_path / "c++", tmp_path / "units"
    compiler.write_text(QUICK.format(units=units))
    compiler.chmod(0o755)
    monkeypatch.setattr(module, "cpu_device", lambda: Device("cpu", "a machine", compiler=str(compiler)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = module._built(["-O1"])
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(tmp_path)) and access(path, mode))
    assert module._built(["-O1"]) == made == tmp_path / "cache" / "moe-engine" / made.name
    assert module._built(["-O2"]).parent == tmp_path / f"moe-engine-{os.getuid()}"


def test_a_user_without_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME and no entry in the password file: no folder `~` in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    assert module.cache_folder() == tmp_path / "tmp" / f"moe-engine-{os.getuid()}"
    assert not (tmp_path / "~").exists()


def test_amx_can_be_refused(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal in this process would be one for all later tests: tiles are a switch of the loaded file."""
    asked: list[bool] = []
    monkeypatch.setattr(module, "_library_or_reason", lambda *options: (asked.append(options[-1]), library)[1])
    monkeypatch.delenv("MOE_ENGINE_CPU_AMX", raising=False)
    load()
    for value in ("0", "1"):
        monkeypatch.setenv("MOE_ENGINE_CPU_AMX", value)
        load()
    load(amx=False)
    assert asked == [True, False, True, False]
    assert without_tiles(library, tmp_path).path != module.PATHS[3]
