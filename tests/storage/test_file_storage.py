"""File storage and sealed pages: a read returns the stored bytes, or a miss; limits, restarts, faults."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.errors import ConfigError
from moe_engine.storage import sealed_pages
from moe_engine.storage.backends import open_storage
from moe_engine.storage.file_storage import FileStorage
from moe_engine.storage.fingerprint import fingerprint_of
from moe_engine.storage.sealed_pages import HEADER, SealedPages
from moe_engine.types.step_settings import StorageSettings
from tests.examples import examples

PAGE = 300
SEALED = HEADER.size + PAGE


def page(seed: int) -> memoryview:
    return memoryview(random.Random(seed).randbytes(PAGE))


def key(number: int) -> bytes:
    return number.to_bytes(20, "big")


def read(pages: SealedPages, *numbers: int) -> list[bytes]:
    targets = [memoryview(bytearray(PAGE)) for _ in numbers]
    count = pages.get([key(number) for number in numbers], targets)
    return [bytes(target) for target in targets[:count]]


def test_pages_outlive_the_storage_that_wrote_them(tmp_path: Path) -> None:
    first = SealedPages(FileStorage(str(tmp_path)), "a", PAGE)
    assert first.put([key(1), key(2)], [page(1), page(2)]) == 2
    again = SealedPages(FileStorage(str(tmp_path)), "a", PAGE)
    assert again.exists([key(1), key(2), key(3), key(1)]) == 2
    assert read(again, 2, 1, 3) == [page(2), page(1)]
    other = SealedPages(FileStorage(str(tmp_path)), "b", PAGE)
    assert other.exists([key(1)]) == 0 and not read(other, 1)
    again.storage.clear()
    assert first.exists([key(1)]) == 0


@settings(max_examples=examples(40))
@given(data=st.data())
def test_damaged_pages_are_misses(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("pages")
    pages = SealedPages(FileStorage(str(folder)), "a", PAGE)
    pages.put([key(1), key(2)], [page(1), page(2)])
    one, two = (next(folder.rglob(f"{pages.name_of(key(i))}*")) for i in (1, 2))
    damage = data.draw(st.sampled_from(["flip", "truncate", "grow", "swap", "empty", "zeros"]))
    content = bytearray(one.read_bytes())
    if damage == "flip":
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
    elif damage == "truncate":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif damage == "grow":
        content += b"\0"
    elif damage == "swap":
        content = bytearray(two.read_bytes())
    else:
        content = bytearray(len(content) if damage == "zeros" else 0)
    one.write_bytes(content)
    if damage == "flip" and 20 <= bit // 8 < HEADER.size:  # padding
        assert read(pages, 1) == [page(1)]
        return
    assert read(pages, 1) == [] and read(pages, 2, 1) == [page(2)]
    assert pages.exists([key(1)]) == 0  # it is stored again
    assert pages.put([key(1)], [page(1)]) == 1 and read(pages, 1, 2) == [page(1), page(2)]


def test_the_pages_used_longest_ago_leave(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path), 10 * SEALED)
    pages = SealedPages(storage, "a", PAGE)
    for i in range(10):
        pages.put([key(i)], [page(i)])
        for path in tmp_path.rglob(f"{pages.name_of(key(i))}*"):
            os.utime(path, (i, i))
    assert read(pages, 0) == [page(0)]  # this read counts as a use
    pages.put([key(10)], [page(10)])
    kept = [i for i in range(11) if pages.exists([key(i)])]
    assert kept[0] == 0 and kept[-1] == 10 and 1 not in kept and len(kept) >= 8
    assert storage.describe()["used_bytes"] == len(kept) * SEALED <= storage.describe()["max_bytes"]


def test_only_pages_are_removed(tmp_path: Path) -> None:
    """The folder may have other files, also in folders named like those of pages."""
    own = [tmp_path / "notes.txt", tmp_path / "go" / "main.go", tmp_path / "ab" / "thesis.tex"]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_text("x" * 5000)
    storage = FileStorage(str(tmp_path), 10 * SEALED)
    pages = SealedPages(storage, "a", PAGE)
    for i in range(30):
        pages.put([key(i)], [page(i)])
    assert 8 <= sum(pages.exists([key(i)]) for i in range(30)) <= 10 and all(path.exists() for path in own)
    storage.clear()
    assert not any(pages.exists([key(i)]) for i in range(30)) and all(path.exists() for path in own)


def test_a_page_that_cannot_be_removed_stops_no_eviction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FileStorage(str(tmp_path), 10 * SEALED)
    pages = SealedPages(storage, "a", PAGE)
    unlink, stuck = os.unlink, pages.name_of(key(0))

    def refuses(path: Any, **more: Any) -> None:
        if stuck in str(path):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", refuses)
    for i in range(40):
        assert pages.put([key(i)], [page(i)]) == 1
        os.utime(next(tmp_path.rglob(f"{pages.name_of(key(i))}*")), (i, i))
    assert pages.num_errors == 0 and storage.describe()["used_bytes"] <= 10 * SEALED
    pages.clear()  # the rest leaves all the same
    assert [i for i in range(40) if pages.exists([key(i)])] == [0] and pages.num_errors == 1


def test_a_folder_removed_or_replaced_while_serving(tmp_path: Path) -> None:
    now, folder = 0.0, tmp_path / "pages"
    pages = SealedPages(FileStorage(str(folder), 20 * SEALED), "a", PAGE, lambda: now)
    assert pages.put([key(1)], [page(1)]) == 1
    shutil.rmtree(folder)
    assert read(pages, 1) == [] and pages.put([key(1)], [page(1)]) == 1 and read(pages, 1) == [page(1)]
    shutil.rmtree(folder)
    folder.write_text("")  # in the place of the folder
    assert read(pages, 1) == [] and pages.put([key(1)], [page(1)]) == 0
    assert pages.exists([key(1)]) == 0
    folder.unlink()
    now += sealed_pages.RETRY_SECONDS + 1
    assert pages.put([key(2)], [page(2)]) == 1 and read(pages, 2) == [page(2)]
    path = next(folder.rglob(f"{pages.name_of(key(2))}*"))
    path.unlink()
    path.mkdir()  # in the place of a page
    assert read(pages, 2) == [] and pages.put([key(3)], [page(3)]) == 1 and read(pages, 3) == [page(3)]


def test_two_processes_keep_one_limit(tmp_path: Path) -> None:
    stores = [SealedPages(FileStorage(str(tmp_path), 40 * SEALED), "a", PAGE) for _ in range(4)]
    for i in range(200):
        stores[i % 4].put([key(i)], [page(i)])
        assert sum(1 for _ in tmp_path.rglob("*.kvpage")) <= (40 + 4 * 6)  # an eighth of the limit for each process


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--hicache-storage-dir .*/file/sub: cannot be written: Not a directory"):
        FileStorage(str(tmp_path / "file" / "sub"))
    if os.getuid():
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(ConfigError, match="Permission denied"):
            FileStorage(str(tmp_path))
        tmp_path.chmod(stat.S_IRWXU)


def test_a_full_disk_at_the_start_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    """A limit of the file size stands for the full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(
            ConfigError, match=r"--hicache-storage-dir .*: cannot be written: File too large; give a folder"
        ):
            FileStorage(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_a_limit_beyond_the_disk_is_refused_with_the_sum(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--hicache-storage-size 1e\+09 GB: .* GB free, .* GB together; give less"):
        FileStorage(str(tmp_path), 10**18)


def test_a_full_disk_makes_room_and_then_pauses_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    storage = FileStorage(str(tmp_path))
    pages = SealedPages(storage, "a", PAGE, lambda: now)
    assert pages.put([key(i) for i in range(10)], [page(i) for i in range(10)]) == 10
    write, full = storage._write, True

    def fails(name: str, content: memoryview) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(name, content)

    monkeypatch.setattr(storage, "_write", fails)
    for i in range(20, 30):
        assert pages.put([key(i)], [page(i)]) == 0
    assert pages.num_errors == 1 and caplog.text.count("No space left on device") == 1
    assert 5 <= sum(bool(read(pages, i)) for i in range(10)) < 10  # removed pages once; reads continue
    full, now = False, sealed_pages.RETRY_SECONDS + 1
    assert pages.put([key(20)], [page(20)]) == 1


def test_errors_of_a_backend_are_misses(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                raise RuntimeError("gone")

            return call

    pages = SealedPages(Broken(), "a", PAGE)  # type: ignore[arg-type]
    assert pages.exists([key(1)]) == 0 and read(pages, 1) == [] and pages.put([key(1)], [page(1)]) == 0
    assert pages.num_errors == 2 and caplog.text.count("gone") == 2


def test_backends_are_named_or_refused(tmp_path: Path) -> None:
    assert isinstance(open_storage(StorageSettings("file", str(tmp_path))), FileStorage)
    for name, why in [("files", "unknown; use file, nixl, mooncake, or the path"), ("os:nothing", "cannot be loaded"),
                      ("builtins:object", "cannot be opened"), ("builtins:print", "has no method exists")]:  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            open_storage(StorageSettings(name, str(tmp_path)))


def test_fingerprints_tell_weights_apart(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(1 << 20)
    prints = set()
    for name, changed in [("a", content), ("b", content), ("c", bytes(1 << 20)), ("d", content + b"1")]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(changed)
        (folder / "config.json").write_text("{}")
        (folder / "notes.txt").write_text(name)
        prints.add(fingerprint_of(str(folder)))
    assert len(prints) == 3 and fingerprint_of(str(tmp_path / "a")) == fingerprint_of(str(tmp_path / "b"))
