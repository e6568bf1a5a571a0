"""Compiles the C++ sources once for this machine, keeps the library in the user's cache folder, and loads it.

The file name holds a hash of sources, flags, compiler and CPU flags, so that any change recompiles and machines with a
shared home folder do not share a library. Object files are kept too: a new version compiles the changed units.
`MOE_ENGINE_CPU_AMX=0` disables AMX tiles.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_engine.kernels.device import cpu_device

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
# slowest first
UNITS = (
    "attention",
    "gemm_bf16",
    "gemm_f32",
    "ops",
    "experts",
    "coded",
    "quantize",
    "linear",
    "sampling",
    "layers",
    "permutation",
    "indexer",
    "block_index",
    "delta",
    "short_conv",
    "compression",
    "streams",
    "hashed_rows",
    "residual_blocks",
    "gated_streams",
    "lora",
    "decoder",
    "decode_step",
    "drafts",
    "draft_step",
    "team",
)
FLAGS = [
    *("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    *("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
]
HEADER = "vec.h"
"""Header that nearly all units include; compiled once for all of them, because it takes as long as a short unit."""
INCLUDED = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
OBJECTS = "cpu_objects"
LOCK, BUILD = ".lock", ".build"
"""Suffixes of files next to a library: held while it is compiled; the compilation's temporary files."""
_ELF = struct.Struct("<40xQ10xHH2x")
"""Header of a 64-bit file: offset, entry size and number of the section headers."""
FULL = (errno.ENOSPC, errno.EDQUOT)
PATHS = {3: "AMX bf16 tiles", 2: "AVX512-BF16", 1: "AVX-512", 0: "portable vectors"}

P, L, N, F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
FUNCTIONS: dict[str, tuple[Any, Sequence[Any]]] = {
    "moe_start": (N, [N]),
    "moe_packed_bytes": (L, [N, L, L]),
    "moe_pack": (None, [N, P, L, L, L, P]),
    "moe_linear": (None, [N, P, L, L, L, P, L, P, P, L, P]),
    "moe_linear_heads": (None, [N, P, L, L, L, L, L, P, L, P, L, L, P]),
    "moe_expert_bytes": (L, [N, L, L, P, P, N]),
    "moe_experts": (None, [N, P, P, P, L, L, L, L, P, P, P, P, P, F]),
    "moe_routed": (None, [N, P, L, L, L, P, P, L, L, L, P, P, L, P, P, P, P, F]),
    "moe_mlp": (None, [N, P, L, L, L, L, P, P, L, P, L, P, P, F]),
    "moe_coded_bytes": (L, [P, L, L]),
    "moe_coded_pack": (None, [P, P, L, P, P, L, L, P]),
    "moe_coded_quantize": (None, [P, N, P, L, L, L, P, N]),
    "moe_fp8_values": (None, [N, N, P, L, L, L, P, L, L, L, L, L, P, L]),
    "moe_fp8_round": (None, [N, P, L, L, L]),
    "moe_rms_norm": (None, [N, N, P, L, P, F, P, L, L]),
    "moe_add_rms_norm": (None, [N, N, P, L, P, P, F, P, L, L]),
    "moe_layer_norm": (None, [N, P, L, P, P, P, F, P, L, L]),
    "moe_silu_and_mul": (None, [N, P, L, P, L, L, F, F, F, N]),
    "moe_rotate": (None, [N, P, L, L, P, P, L, N, N, L, L]),
    "moe_write_latent": (None, [N, N, P, L, P, F, P, P, L, N, P, N, N, P, L, L, L, F]),
    "moe_write_kv": (None, [P, L, L, P, L, L, P, N, P, L, P, L, L, L, L, L]),
    "moe_write_kv_fp8": (None, [N, N, P, L, L, P, N, P, L, L, L, L]),
    "moe_add_input": (None, [N, P, L, P, P, L, P, L, P, L, L]),
    "moe_route": (None, [N, N, P, L, L, L, P, P, P, P, P, P]),
    "moe_absorbed": (None, [N, N, P, L, L, P, L, P, L, L, L, F, P, P]),
    "moe_paged": (None, [N, N, P, L, L, P, L, L, P, L, L, P, L, L, L, L, F, F, P, P]),
    "moe_expanded": (None, [N, P, L, L, P, L, L, P, L, P, N, L, L, L, L, F, P]),
    "moe_gather": (None, [P, L, L, P, P]),
    "moe_gather_fp8": (None, [N, N, P, L, L, L, P, P]),
    "moe_mla_layer": (None, [N, P, P, L, L, P, P, N, P, L, P, P, L, P]),
    "moe_moe_layer": (None, [N, P, P, L, L, L, P, P]),
    "moe_decoder": (None, [N, P, P, L, P, P, P, P, P, P]),
    "moe_decode_step": (L, [N, P, P, P, P, L, P, P, P]),
    "moe_draft_chain": (None, [N, P, L, L, L, P, P, P, P, P, P, P, P, P, P, P]),
    "moe_draft_remember": (None, [N, P, L, L, P, P, P, P, P, N, P, L]),
    "moe_draft_step": (L, [N, P, P, L, L, P, P, P, P]),
    "moe_greedy": (None, [P, L, L, L, P]),
    "moe_sample": (None, [P, L, L, L, P, P, P, P, P, P]),
    "moe_probabilities": (None, [P, L, L, L, P, P, P, P, P, L, P]),
    "moe_rows_check": (N, [N, P, L, L, L, L]),
    "moe_rows_route": (None, [P, L, L, L, L, L, P, P, P]),
    "moe_rows_pack": (None, [P, L, L, P, L, P, L, P]),
    "moe_rows_take": (None, [P, L, P, P, L, L, L, L, L, P, P]),
    "moe_rows_localize": (None, [P, L, L, L, L, L]),
    "moe_rows_group": (None, [P, L, L, L, L, P, P]),
    "moe_rows_permute": (None, [P, L, L, P, L, L, P]),
    "moe_rows_combine": (None, [N, P, L, P, L, P, L, P, L, P, L, L]),
    "moe_index_select": (None, [N, N, P, L, L, P, P, L, P, L, L, L, L, P, L, P, L, L]),
    "moe_hashed_rows": (None, [P]),
    "moe_block_select": (None, [N, P, L, L, P, L, P, L, L, L, L, L, L, P, L]),
    "moe_gated_delta": (None, [N, P, P, P, P, P, P, P]),
    "moe_short_conv": (None, [N, P, P, P, P]),
    "moe_compress": (None, [N, P, P, L, P, L, P, L]),
    "moe_mix_streams": (None, [N, P, P, L, P, L, P]),
    "moe_mix_blocks": (None, [N, P, P, L, P, L, P]),
    "moe_norm_gated": (None, [N, P, P, L, P, L, P, P]),
    "moe_rank_gates": (None, [N, P, P, L, L, P, L, P]),
    "moe_read_gated": (None, [N, P, P, P, P]),
    "moe_lora": (None, [N, P, P, P, L, L, L, P, P, L, P, L, P, P]),
}


class LibraryError(RuntimeError):
    """The C++ library cannot be compiled or loaded on this machine; the message has the reason."""


class Library:
    """The loaded library: one attribute per function in `FUNCTIONS`, called with integers and raw pointers."""

    moe_packed_bytes: Any
    moe_pack: Any
    moe_linear: Any
    moe_linear_heads: Any
    moe_expert_bytes: Any
    moe_experts: Any
    moe_routed: Any
    moe_mlp: Any
    moe_coded_bytes: Any
    moe_coded_pack: Any
    moe_coded_quantize: Any
    moe_fp8_values: Any
    moe_fp8_round: Any
    moe_rms_norm: Any
    moe_gated_delta: Any
    moe_short_conv: Any
    moe_compress: Any
    moe_mix_blocks: Any
    moe_mix_streams: Any
    moe_norm_gated: Any
    moe_rank_gates: Any
    moe_read_gated: Any
    moe_add_rms_norm: Any
    moe_layer_norm: Any
    moe_silu_and_mul: Any
    moe_rotate: Any
    moe_write_latent: Any
    moe_write_kv: Any
    moe_write_kv_fp8: Any
    moe_add_input: Any
    moe_route: Any
    moe_absorbed: Any
    moe_paged: Any
    moe_expanded: Any
    moe_gather: Any
    moe_gather_fp8: Any
    moe_mla_layer: Any
    moe_moe_layer: Any
    moe_decoder: Any
    moe_decode_step: Any
    moe_draft_chain: Any
    moe_draft_remember: Any
    moe_draft_step: Any
    moe_greedy: Any
    moe_sample: Any
    moe_probabilities: Any
    moe_rows_check: Any
    moe_rows_route: Any
    moe_rows_pack: Any
    moe_rows_take: Any
    moe_rows_localize: Any
    moe_rows_group: Any
    moe_rows_permute: Any
    moe_rows_combine: Any
    moe_index_select: Any
    moe_hashed_rows: Any
    moe_block_select: Any
    moe_lora: Any

    def __init__(self, file: Path, amx: bool) -> None:
        try:
            ctypes.CDLL(str(openmp_runtime()))  # torch's, found by its name afterwards, also before torch is imported
            self._dll = ctypes.CDLL(str(file))
        except OSError as error:
            raise LibraryError(f"cannot load the compiled CPU kernels: {error}") from error
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(self._dll, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.file = file
        self.path = PATHS[self._dll.moe_start(int(amx))]


def _named_folder() -> Path | None:
    """``$XDG_CACHE_HOME/moe-engine``, by default ``~/.cache/moe-engine``. None: the user has no home folder."""
    home = os.path.expanduser("~")  # "~" without HOME and without an entry in the password file, as in OpenShift
    base = os.environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if os.path.isabs(home) else None)
    return None if base is None else Path(base) / "moe-engine"


def cache_folder() -> Path:
    """Folder of everything that is compiled or generated once for a machine: `_named_folder`, or one in the temporary
    folder if that one cannot be written. Raises LibraryError: neither can be used."""
    folder = _named_folder()
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    folder = Path(tempfile.gettempdir()) / f"moe-engine-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise LibraryError(f"no cache folder: {folder} belongs to another user; set XDG_CACHE_HOME")
    return folder


def openmp_runtime() -> Path:
    """The OpenMP library that torch uses. The library links the same file: two runtimes would spin two thread pools."""
    names = ("libgomp", "libomp", "libiomp5")
    found: list[Path] = []
    try:
        with open("/proc/self/maps") as maps:
            found += [Path(line.split(None, 5)[5].strip()) for line in maps if line.count("/") > 1]
    except OSError:
        pass
    torch = find_spec("torch")  # not imported: `make` compiles before what torch imports is installed
    if torch is None or torch.origin is None:
        raise LibraryError("torch is not installed")
    package = Path(torch.origin).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        if folder.is_dir():
            found += sorted(folder.iterdir())
    for path in found:
        if path.name.startswith(names) and ".so" in path.name:
            return path
    raise LibraryError("torch was built without an OpenMP runtime (no libgomp or libomp among its libraries)")


@contextmanager
def _compilers(folder: str) -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """A function that starts a compiler, with temporary files in `folder` and errors in English. None is left after the
    `with` block, nor when this process is killed: a shell in their process group then reads the end of a pipe, and
    kills the group."""
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    environ = {**os.environ, "TMPDIR": folder, "LC_ALL": "C"}
    with ExitStack() as processes:
        guard = processes.enter_context(
            subprocess.Popen(["sh", "-c", "read end; kill -s KILL 0"], stdin=pipe, process_group=0)
        )

        def start(command: list[str]) -> subprocess.Popen[str]:
            options: Any = {"stdin": null, "stdout": null, "stderr": pipe, "text": True, "process_group": guard.pid}
            return processes.enter_context(subprocess.Popen(command, env=environ, **options))

        try:
            yield start
        finally:
            os.killpg(guard.pid, signal.SIGKILL)


def _finish(process: subprocess.Popen[str], command: list[str], folder: str) -> None:
    _, errors = process.communicate()
    if process.returncode != 0:
        if "No space left" in errors:
            raise LibraryError(_full(Path(folder).parent))
        lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()
        raise LibraryError(f"{command[0]} failed ({process.returncode}): " + " | ".join(lines[:3]))


def _full(cache: Path) -> str:
    return f"{cache} is full: free space there, or set XDG_CACHE_HOME to another folder"


def _is_whole(file: Path) -> bool:
    """Whether a library or object file exists and has its end, the section headers. A copy that a full disk has cut
    kills the process that calls it (SIGBUS)."""
    try:
        with open(file, "rb") as opened:
            head, size = opened.read(_ELF.size), os.fstat(opened.fileno()).st_size
    except OSError:
        return False
    if not head.startswith(b"\x7fELF"):  # of another system
        return bool(head)
    if len(head) < _ELF.size:
        return False
    begin, entry_bytes, num_entries = _ELF.unpack(head)
    return bool(size >= begin + entry_bytes * num_entries)


@contextmanager
def _build_folder(target: Path) -> Iterator[str]:
    """A folder for the temporary files of a compilation that holds the lock of `target`."""
    folder = target.with_suffix(BUILD)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(cache: Path) -> None:
    """Removes the build folders of killed processes: their locks are free."""
    for folder in cache.glob(f"*{BUILD}"):
        with suppress(OSError), open(folder.with_suffix(LOCK), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _text(unit: str) -> str:
    """A unit's source and the headers that it includes, directly and indirectly."""
    found: dict[str, str] = {}
    waiting = [f"{unit}.cpp", HEADER]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = (SOURCES / name).read_text()
            waiting += INCLUDED.findall(found[name])
    return "".join(f"{name}\0{found[name]}\0" for name in sorted(found))


def _units(flags: list[str], toolchain: str, folder: Path) -> dict[str, tuple[list[str], Path]]:
    """Flags and object file of each unit. A macro belongs to the units in whose sources it occurs."""
    found = {}
    for unit in UNITS:
        text = _text(unit)
        own = [flag for flag in flags if not flag.startswith("-D") or flag[2:] in text]
        digest = hashlib.sha256("\0".join((toolchain, *own, unit, text)).encode())
        found[unit] = own, folder / f"{digest.hexdigest()[:20]}.o"
    return found


def _compile(compiler: str, flags: list[str], toolchain: str, runtime: Path, target: Path) -> None:
    units = _units(flags, toolchain, target.parent / OBJECTS)
    with _build_folder(target) as folder, _compilers(folder) as start:
        waiting = [unit for unit, (_, file) in units.items() if not _is_whole(file)]
        common = Path(folder) / "all.h"
        common.write_text(f'#include "{SOURCES / HEADER}"\n')
        if len(waiting) > 4:
            command = [compiler, *flags, "-x", "c++-header", str(common), "-o", f"{common}.gch"]
            _finish(start(command), command, folder)
        running: list[tuple[str, subprocess.Popen[str], list[str]]] = []
        jobs = max(os.cpu_count() or 1, 1)
        while waiting or running:
            while waiting and len(running) < jobs:
                unit = waiting.pop(0)
                command = [compiler, *units[unit][0], "-include", str(common), "-c", str(SOURCES / f"{unit}.cpp")]
                command += ["-o", f"{folder}/{unit}.o"]
                running.append((unit, start(command), command))
            done = next((item for item in running if item[1].poll() is not None), None)
            if done is None:
                time.sleep(0.01)
                continue
            running.remove(done)
            _finish(*done[1:], folder)
            file = units[done[0]][1]
            file.parent.mkdir(exist_ok=True)
            os.replace(f"{folder}/{done[0]}.o", file)
        made = f"{folder}/library.so"
        command = [compiler, "-shared", "-o", made, *(str(file) for _, file in units.values()), str(runtime)]
        _finish(start(command), command, folder)
        os.replace(made, target)


def _built(flags: list[str]) -> Path:
    """Path of the compiled library; compiles it on first use."""
    device = cpu_device()
    compiler = device.compiler
    if compiler is None:
        raise LibraryError("needs a C++ compiler (g++ or clang++) on PATH, found none")
    runtime = openmp_runtime()
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise LibraryError(f"{compiler} --version failed: {error}") from error
    toolchain = "\0".join((compiler, version, device.name, " ".join(sorted(device.cpu_flags))))
    digest = hashlib.sha256("\0".join((toolchain, " ".join(flags), runtime.name, " ".join(UNITS))).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".h", ".cpp"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    name, named = f"cpu_kernels-{digest.hexdigest()[:20]}.so", _named_folder()
    if named is not None and _is_whole(named / name):  # also on a read-only file system; no error if it is hidden
        return named / name
    folder = cache_folder()
    target = folder / name
    if _is_whole(target):
        return target
    # Processes that start together wait for the first to compile; the rename keeps races safe.
    with open(target.with_suffix(LOCK), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(target):
            _remove_abandoned(folder)
            start = time.perf_counter()
            # a warning, which commands without log lines show too: it takes a minute
            logger.warning("compiling CPU kernels with %s (once for this machine; kept in %s)", compiler, folder)
            _compile(compiler, flags, toolchain, runtime, target)
            logger.info("compiled CPU kernels in %.1f s", time.perf_counter() - start)
    return target


def load(
    march: str = "native", defines: tuple[str, ...] = (), optimize: str = "-O3", amx: bool | None = None
) -> Library:
    """The library for this machine, compiled if needed. A failure is cached: a broken compiler is tried once.

    Args:
        march: instruction set to compile for; tests use older ones.
        defines: extra macros (``MOE_AMX_EMULATE`` runs the tile kernels on any machine, slowly). Units without them are
            those of the engine's library.
        optimize: optimization flag; tests of other machines' code paths use a lower level to compile faster.
        amx: whether AMX tiles may be used where they exist; default True unless MOE_ENGINE_CPU_AMX=0.

    Raises:
        LibraryError: with the reason, if it cannot be compiled or loaded.
    """
    if amx is None:
        amx = os.environ.get("MOE_ENGINE_CPU_AMX", "1") != "0"
    found = _library_or_reason(march, defines, optimize, amx)
    if isinstance(found, str):
        raise LibraryError(found)
    return found


@lru_cache
def _library_or_reason(march: str, defines: tuple[str, ...], optimize: str, amx: bool) -> Library | str:
    flags = [*FLAGS, optimize, f"-march={march}", *(f"-D{define}" for define in defines)]
    try:
        return Library(_built(flags), amx)
    except LibraryError as error:
        return str(error)
    except OSError as error:
        return _full(cache_folder()) if error.errno in FULL else f"cannot compile the CPU kernels: {error}"
