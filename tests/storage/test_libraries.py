"""Storage rows over third-party libraries: NIXL's POSIX plugin and Mooncake's store, the real ones if they are
installed, and emulators of their documented behavior."""

from __future__ import annotations

import importlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_engine.errors import ConfigError
from moe_engine.processes.addresses import free_port
from moe_engine.storage import backends, mooncake_storage
from moe_engine.storage.backends import open_storage
from moe_engine.storage.file_storage import FileStorage
from moe_engine.storage.mooncake_storage import PREFIX, MooncakeStorage
from moe_engine.storage.nixl_storage import NixlStorage
from moe_engine.storage.protocol import PageStorage
from moe_engine.storage.sealed_pages import SealedPages
from moe_engine.types.step_settings import StorageSettings
from tests.storage import emulators

Open = Callable[[], PageStorage]
PAGE = 300


def real(module: str) -> None:
    """Skips the test if the library does not load."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{module} does not load: {error}")


@pytest.fixture
def master() -> Iterator[str]:
    """Address of a real `mooncake_master`."""
    import mooncake

    assert mooncake.__file__
    program = Path(mooncake.__file__).parent / "mooncake_master"
    port = free_port()
    command = [str(program), "--rpc_port", str(port), "--metrics_port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
        process.terminate()


@pytest.fixture(params=["nixl", "nixl, emulated", "mooncake", "mooncake, emulated"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens one storage, with a new client for each call."""
    library, _, emulated = request.param.partition(", ")
    modules = emulators.nixl_modules() if library == "nixl" else emulators.mooncake_modules()
    if emulated:
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
    else:
        real(list(modules)[1])
    if library == "nixl":
        return lambda: open_storage(StorageSettings("nixl", str(tmp_path)))
    monkeypatch.setattr(emulators.MooncakeStore, "masters", {"127.0.0.1:1": {}})
    address = "127.0.0.1:1" if emulated else request.getfixturevalue("master")
    extra = {"master_server_address": address, "local_hostname": "127.0.0.1", "global_segment_size": 32 << 20}
    return lambda: MooncakeStorage(extra)


def pages(count: int, seed: int = 1, size: int = PAGE) -> list[memoryview]:
    return [memoryview(random.Random(f"{seed} {i}").randbytes(size)) for i in range(count)]


def names(count: int, mark: str = "a") -> list[str]:
    return [f"{mark}{i:02x}" for i in range(count)]


def read(storage: PageStorage, wanted: list[str], size: int = PAGE) -> list[bytes | None]:
    targets = [memoryview(bytearray(size)) for _ in wanted]
    there = storage.get(wanted, targets)
    return [bytes(target) if found else None for target, found in zip(targets, there)]


def test_pages_come_back_to_another_client(opened: Open) -> None:
    storage = opened()
    wanted, content = names(70), pages(70)  # more than one transfer
    assert storage.put(wanted, content) == [True] * 70
    assert storage.exists([*wanted, "none"]) == 70 and storage.exists(["none", *wanted]) == 0
    other = opened()
    assert read(other, [*wanted[5:9], "none", wanted[0]]) == [*content[5:9], None, content[0]]
    assert storage.put(wanted[:2], content[:2]) == [True, True]  # again
    assert storage.put([], []) == [] and storage.get([], []) == []
    large = pages(2, seed=2, size=3 << 20)
    assert storage.put(names(2, "b"), large) == [True, True] and read(other, names(2, "b"), 3 << 20) == large
    assert read(other, names(1, "b"), PAGE) == [None]  # pages of another size
    assert read(other, wanted[-1:], PAGE + 1) == [None]
    storage.delete([wanted[1], "none"])
    assert storage.exists(wanted) == 1 and read(other, wanted[:3]) == [content[0], None, content[2]]
    storage.clear()
    assert other.exists(wanted) == 0 and storage.exists(names(2, "b")) == 0
    facts = storage.describe()
    assert {"used_bytes", "max_bytes"} <= facts.keys()
    storage.close()
    other.close()


def test_several_threads_at_once(opened: Open) -> None:
    storage = opened()
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            wanted, content = names(8, f"t{number}"), pages(8, seed=number)
            for _ in range(3):
                assert storage.put(wanted, content) == [True] * 8 and read(storage, wanted) == content
        except BaseException as error:  # reported below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    storage.close()
    assert not failed


def test_sealed_pages_over_them(opened: Open) -> None:
    storage = opened()
    first = SealedPages(storage, "a", PAGE)
    keys = [bytes([i]) * 20 for i in range(5)]
    assert first.put(keys, pages(5)) == 5
    targets = [memoryview(bytearray(PAGE)) for _ in keys]
    assert SealedPages(opened(), "a", PAGE).get(keys, targets) == 5 and targets == pages(5)
    assert SealedPages(opened(), "b", PAGE).exists(keys) == 0
    assert first.num_errors == 0


@pytest.mark.parametrize("emulated", [True, False])
def test_nixl_reads_around_damaged_files(emulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that shrink between the size check and the read, and a failed transfer: other pages are read."""
    if emulated:
        for name, module in emulators.nixl_modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    else:
        real("nixl._api")
    storage = NixlStorage(str(tmp_path), 0, {})
    wanted, content = names(4), pages(4)
    assert storage.put(wanted, content) == [True] * 4
    size = os.stat(storage._path(wanted[1])).st_size
    os.truncate(storage._path(wanted[1]), 10)
    monkeypatch.setattr(os, "fstat", lambda descriptor: os.stat_result((0o600, 0, 0, 0, 0, 0, size, 0, 0, 0)))
    assert read(storage, wanted) == [content[0], None, *content[2:]]
    monkeypatch.undo()
    assert FileStorage(str(tmp_path)).exists(wanted) == 4  # the same folder as `file`


def test_a_failed_write_is_repeated_without_nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in emulators.nixl_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    storage = NixlStorage(str(tmp_path), 0, {})
    agent, _ = storage._agent()
    monkeypatch.setattr(agent, "check_xfer_state", lambda handle: "ERR")
    wanted, content = names(3), pages(3)
    assert storage.put(wanted, content) == [True] * 3
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.kvpage.*")) and agent.open_handles == 0 and not agent._registered
    for name, module in emulators.nixl_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert read(storage, wanted) == content


def test_nixl_keeps_the_limit_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in emulators.nixl_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    storage = NixlStorage(str(tmp_path), 10 * PAGE, {})
    for part in range(6):
        storage.put(names(4, f"p{part}"), pages(4, seed=part))
    held = sum(path.stat().st_size for path in tmp_path.rglob("*.kvpage"))
    assert 0 < held <= 10 * PAGE and storage.describe()["used_bytes"] == held
    assert storage.put(["big"], pages(1, size=11 * PAGE)) == [False]


@pytest.mark.parametrize("backend, extra, why", [
    ("nixl", '{"plugin": "S3"}', "plugin 'S3'.*POSIX, GDS"),
    ("nixl", '{"size": 1}', "size: unknown"),
    ("nixl", '{"plugin": "GDS"}', "plugin GDS: no plugin"),
    ("mooncake", "", "MOONCAKE_MASTER.*master_server_address"),
    ("mooncake", '{"master": "a:1"}', "master: unknown"),
    ("mooncake", '{"master_server_address": "a:1", "protocol": "ib"}', "use tcp or rdma"),
    ("mooncake", '{"master_server_address": "a:1", "global_segment_size": "4gb"}', "number of bytes"),
    ("mooncake", '{"master_server_address": "127.0.0.1:9"}', "master at 127.0.0.1:9.*failed with code"),
])  # fmt: skip
def test_wrong_settings_are_refused(
    backend: str, extra: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in {**emulators.nixl_modules(), **emulators.mooncake_modules()}.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ConfigError, match=why):
        open_storage(StorageSettings(backend, str(tmp_path), extra=extra))


def test_variables_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in emulators.mooncake_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(emulators.MooncakeStore, "masters", {"m:1": {}})
    environ = {"MOONCAKE_MASTER": "m:1", "MOONCAKE_GLOBAL_SEGMENT_SIZE": "1024"}
    storage = MooncakeStorage(mooncake_storage.settings_in(environ))
    assert storage.describe()["segment_bytes"] == 1024
    storage.put(["x"], pages(1))
    assert list(emulators.MooncakeStore.masters["m:1"]) == [f"{PREFIX}x"]


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_a_missing_package_is_named_with_its_extra(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nixl", "nixl._api", "mooncake", "mooncake.store"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    extra: dict[str, Any] = {"master_server_address": "a:1"} if backend == "mooncake" else {}
    monkeypatch.setattr(backends, "extra_of", lambda settings: extra)
    with pytest.raises(ConfigError, match=rf"pip install -e '\.\[{backend}\]'"):
        open_storage(StorageSettings(backend, str(tmp_path)))
