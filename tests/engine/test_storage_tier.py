"""Storage below the host tier with real kernels and files: the tokens of an engine without storage, over restarts and
faults; round trips of all tensors of a pool."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.errors import ConfigError
from moe_engine.storage.file_storage import FileStorage
from moe_engine.storage.sealed_pages import SealedPages
from moe_engine.types import KVBackup, KVFetch, KVLoad, KVOps, KVReport
from moe_engine.types.step_settings import StorageSettings
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.host_pool import LAYOUTS
from moe_engine.worker.kv_cache.kv_copies import KVCopies
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from moe_engine.worker.kv_cache.storage_io import READERS, StorageIO
from moe_engine.worker.startup import build_runner
from tests.engine.harness import Answer, InProcessEngine
from tests.engine.test_host_tier import CHAIN, LIMITS, sessions
from tests.engine.test_windows import ALTERNATING
from tests.models.checkpoints import make_checkpoint
from tests.speculation.agreeing import agreeing_checkpoint
from tests.waiting import until

FORMS: dict[str, dict[str, Any]] = {
    "write-through": {"page_size": 4, "hicache_storage_backend": "file"},
    "windows": {"page_size": 4, "hicache_storage_backend": "file"},
    "write-back, chain, layers first": {
        "page_size": 4, "hicache_storage_backend": "file", "hicache_write_policy": "write_back",
        "hicache_mem_layout": "layer_first", **CHAIN,
    },
    "faults": {"page_size": 8, "hicache_storage_backend": "tests.engine.test_storage_tier:FaultyStorage"},
}  # fmt: skip
EXTRA = '{"prefetch_threshold": 8, "prefetch_timeout_base": 20}'


class FaultyStorage(FileStorage):
    """Loses, damages, delays and refuses pages at random."""

    def __init__(self, settings: StorageSettings, rank: int) -> None:
        super().__init__(settings.directory)
        self._random = random.Random(rank)

    def get(self, names: Sequence[str], targets: Sequence[memoryview]) -> list[bool]:
        found = super().get(names, targets)
        for i, target in enumerate(targets):
            luck = self._random.random()
            if luck < 0.05:
                found[i] = False
            elif luck < 0.15:
                bit = self._random.randrange(8 * len(target))
                target[bit // 8] ^= 1 << bit % 8
            elif luck < 0.2:
                time.sleep(0.02)
        return found

    def put(self, names: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        if self._random.random() < 0.1:
            return [False] * len(names)
        stored = super().put(names, pages)
        if self._random.random() < 0.05:
            os.truncate(self._path(names[0]), self._random.randrange(len(pages[0])))
        return stored


@pytest.fixture(scope="module", params=list(FORMS))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessEngine]:
    folder = tmp_path_factory.mktemp("storage")
    if request.param == "windows":  # alternating: full attention, and windows that keep their whole context here
        path = make_checkpoint("qwen3", folder / "model", **ALTERNATING, sliding_window=9)
    else:
        path = agreeing_checkpoint("deepseek_v3", folder / "model", 5, num_hidden_layers=2, num_mtp_layers=1)
    engine = InProcessEngine(
        path, folder / "board", **LIMITS, **FORMS[request.param], hicache_storage_dir=str(folder / "pages"),
        hicache_storage_backend_extra_config=EXTRA,
    )  # fmt: skip
    yield engine
    engine.close()


def run(engine: InProcessEngine, **changes: Any) -> dict[str, list[int]]:
    answers: dict[str, Answer] = engine.run(sessions(1, turns=2), **changes)
    copies = engine.worker.runner.kv_copies
    assert copies is not None and copies.storage is not None
    storage = copies.storage
    until(lambda: not storage.num_open)
    return {rid: answer.token_ids for rid, answer in answers.items()}


def test_a_folder_that_cannot_be_written_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model", **ALTERNATING)
    monkeypatch.setattr(build_runner, "_load", lambda *_: pytest.fail("weights are read"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--hicache-storage-dir .*: cannot be written"):
        InProcessEngine(path, tmp_path / "board", **LIMITS, **FORMS["write-through"],
                        hicache_storage_dir=str(tmp_path / "file" / "pages"))  # fmt: skip


def test_restarted_engines_get_the_same_tokens(engine: InProcessEngine) -> None:
    """Each run has a new scheduler without knowledge of earlier runs."""
    plain = run(engine, host_tier_tokens=0, storage=None)
    assert run(engine) == plain
    assert run(engine) == plain
    stats = engine.scheduler.stats()
    assert stats.storage_hit_tokens_total > 40
    policies = [{"policy": "best_effort"}, {"policy": "wait_complete"}]
    storage = engine.config.storage
    assert storage is not None
    for changes in policies:
        assert run(engine, storage=replace(storage, **changes)) == plain


def copies_of(pool: KVPool, layout: str, folder: Path, page: int) -> tuple[KVCopies, list[KVReport]]:
    copies = KVCopies(pool, 8 * page, DeviceStream("cpu"), layout=layout)
    pages = SealedPages(FileStorage(str(folder)), "schema", page * copies.host.width)
    copies.storage = StorageIO(copies.host, pages, page, writes=True)
    reports: list[KVReport] = []
    copies.storage.report_to(reports.append)
    return copies, reports


def wait_for(reports: list[KVReport], number: int) -> int:
    ended = until(lambda: [report for report in reports if report.id == number and report.ended])
    return ended[0].num_pages


def round_trip(pool: KVPool, folder: Path, layouts: tuple[str, str]) -> None:
    """Random bytes in all tensors of the pool: device, host, file, another engine's host and device."""
    page = pool.page_size
    slots = list(range(page, 4 * page))
    before = [tensor.view(torch.uint8) for tensor in pool.tensors()]
    for tensor in before:
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    expected = [tensor.clone() for tensor in before]
    copies, reports = copies_of(pool, layouts[0], folder, page)
    keys = [bytes([i]) * 20 for i in range(3)]
    places = [place for i in (5, 1, 4) for place in range(i * page, i * page + page)]
    copies.start(KVOps(slots, places, backups=[KVBackup(1, keys, [5, 1, 4])]))
    assert wait_for(reports, 1) == 3
    for tensor in before:
        tensor.zero_()
    copies.close()
    copies, reports = copies_of(pool, layouts[1], folder, page)
    copies.start(KVOps(fetches=[KVFetch(1, [*keys, b"x" * 20], []), KVFetch(2, [*keys, b"x" * 20], [0, 3, 7, 2])]))
    assert wait_for(reports, 1) == wait_for(reports, 2) == 3
    places = [place for i in (0, 3, 7) for place in range(i * page, i * page + page)]
    copies.start(KVOps(loads=[KVLoad(1, places, slots)]))
    copies.close()
    for now, then in zip(before, expected):
        assert torch.equal(now[slots], then[slots]) and not now[:page].any() and not now[4 * page :].any()


@pytest.mark.parametrize("layouts", [(a, b) for a in LAYOUTS for b in LAYOUTS])
@pytest.mark.parametrize("spec", ["mla", "gqa"])
def test_every_layout_reads_what_every_layout_wrote(spec: str, layouts: tuple[str, str], tmp_path: Path) -> None:
    made = KVSpec.mla(3, 4, 2, torch.bfloat16) if spec == "mla" else KVSpec.gqa(3, 2, 4, torch.float8_e4m3fn)
    round_trip(KVPool(made, 24, 4, DeviceStream("cpu")), tmp_path, layouts)


def test_reports_of_a_fetch_arrive_in_order(tmp_path: Path) -> None:
    """Parts of a fetch end on several threads, and the last report ends the fetch."""
    copies, _ = copies_of(KVPool(KVSpec.mla(1, 4, 2, torch.float32), 32, 1, DeviceStream("cpu")), "page_first",
                          tmp_path, 1)  # fmt: skip
    assert copies.storage is not None
    reports: list[KVReport] = []
    overtaken = threading.Event()

    def slow_to_report(report: KVReport) -> None:
        if not report.ended and not reports:
            overtaken.wait(0.2)  # meanwhile another thread would report its part
        reports.append(report)
        overtaken.set()

    keys = [bytes([i]) * 20 for i in range(8)]
    copies.storage.report_to(slow_to_report)
    copies.storage.start(KVOps(fetches=[KVFetch(1, keys, list(range(8)))]), [])
    wait_for(reports, 1)
    copies.close()
    assert [report.ended for report in reports] == [False, True]


def test_ranks_without_a_share_report_all_pages(tmp_path: Path) -> None:
    """A report is the minimum over all ranks."""
    copies, reports = copies_of(KVPool(KVSpec.mla(1, 4, 2, torch.float32), 8, 1, DeviceStream("cpu")), "page_first",
                                tmp_path, 1)  # fmt: skip
    assert copies.storage is not None
    copies.storage._writes = False
    copies.storage.start(KVOps(backups=[KVBackup(1, [b"k" * 20, b"l" * 20], [0, 1])]), [])
    assert reports == [KVReport(1, 2, True)]
    copies.close()


def test_lookups_stopped_behind_hanging_ones_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the storage has recovered, new lookups do not wait behind stopped ones."""
    copies, reports = copies_of(KVPool(KVSpec.mla(1, 4, 2, torch.float32), 8, 1, DeviceStream("cpu")), "page_first",
                                tmp_path, 1)  # fmt: skip
    assert copies.storage is not None
    answers, asked = threading.Event(), list[bytes]()

    def exists(keys: Sequence[bytes]) -> int:
        asked.append(keys[0])
        assert answers.wait(60)
        return 1

    monkeypatch.setattr(copies.storage.pages, "exists", exists)
    hung, last = READERS, READERS + 10
    fetches = [KVFetch(number, [bytes([number]) * 20], []) for number in range(1, last + 1)]
    copies.storage.start(KVOps(fetches=fetches), [])
    until(lambda: len(asked) == hung)
    copies.storage.start(KVOps(stops=list(range(1, last))), [])
    answers.set()
    assert wait_for(reports, last) == 1 and sorted(asked) == [bytes([n]) * 20 for n in (*range(1, hung + 1), last)]
    copies.close()


def test_a_fetch_behind_a_failed_copy_reports_nothing(tmp_path: Path) -> None:
    copies, reports = copies_of(KVPool(KVSpec.mla(1, 4, 2, torch.float32), 8, 1, DeviceStream("cpu")), "page_first",
                                tmp_path, 1)  # fmt: skip
    failed: Future[None] = Future()
    failed.set_exception(RuntimeError("broken"))
    assert copies.storage is not None
    copies.storage.start(KVOps(backups=[KVBackup(1, [b"k" * 20], [0])]), [failed])
    assert wait_for(reports, 1) == 0 and copies.storage.pages.exists([b"k" * 20]) == 0
    copies.storage.start(KVOps(stops=[9]), [])  # of a plan that never started
    assert wait_for(reports, 9) == 0
    copies.storage.start(KVOps(fetches=[KVFetch(9, [b"k" * 20], [])]), [])
    assert [report.id for report in reports].count(9) == 1
    copies.close()
