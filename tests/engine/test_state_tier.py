"""Host tier and storage with the states of Qwen3-Next: answers equal transformers', over evictions and restarts; bytes
of states over device, host and storage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.models.config_sections.state import StateGroup, StatePart
from moe_engine.storage.file_storage import FileStorage
from moe_engine.storage.sealed_pages import SealedPages
from moe_engine.types import KVBackup, KVFetch, KVLoad, KVOps, KVReport
from moe_engine.types.kv_ops import LAST_STATE
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.host_states import HostStates
from moe_engine.worker.kv_cache.kv_copies import KVCopies
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from moe_engine.worker.kv_cache.state_pool import StatePool
from moe_engine.worker.kv_cache.storage_io import StorageIO
from tests.engine.harness import InProcessEngine, Scripted
from tests.engine.test_host_tier import LIMITS
from tests.engine.test_qwen3_next import MTP
from tests.engine.test_states import check
from tests.engine.test_storage_tier import EXTRA, wait_for
from tests.models.checkpoints import make_checkpoint
from tests.waiting import until

FLAGS: dict[str, Any] = {
    "page_size": 4, "hicache_storage_backend": "file", "hicache_storage_backend_extra_config": EXTRA,
    "max_mamba_cache_size": 8, "mamba_track_interval": 8,
}  # fmt: skip
ROUNDS = (
    {"host_tier_tokens": 0, "storage": None},
    {"hicache_write_policy": "write_back"},
    {"hicache_write_policy": "write_through_selective"},
    {"hicache_write_policy": "write_through"},
    {"hicache_write_policy": "write_through"},
)


@pytest.fixture(
    scope="module", params=[{}, pytest.param(MTP, marks=pytest.mark.exhaustive)], ids=["plain", "drafts"]
)  # fmt: skip
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InProcessEngine, torch.nn.Module]]:
    import transformers

    folder = tmp_path_factory.mktemp("tier")
    path = make_checkpoint("qwen3_next", folder / "model", random.randrange(2**31), num_mtp_layers=1)
    flags = LIMITS | FLAGS | request.param
    engine = InProcessEngine(path, folder / "status", **flags, hicache_storage_dir=str(folder / "pages"))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    yield engine, model.eval()
    engine.close()


def turns(rng: random.Random) -> list[Scripted]:
    """Sessions that exceed the pool; each turn repeats the session's prompt and adds to it."""
    texts, script = [[rng.randrange(250) for _ in range(40)] for _ in range(5)], list[Scripted]()
    for turn in range(2):
        for i, text in enumerate(texts):
            text += [rng.randrange(250) for _ in range(8)]
            sampling = {"temperature": 0.0, "ignore_eos": True}
            script.append(
                Scripted(f"{i}.{turn}", list(text), 5, arrives=8 * len(script), sampling=sampling, logprob=True)
            )
    return script


def test_answers_equal_transformers_with_every_write_policy(served: Any) -> None:
    """Each round has a new scheduler without knowledge of earlier rounds; the last ones find their storage."""
    engine, model = served
    script = turns(random.Random(random.randrange(2**31)))
    loaded = []
    for changes in ROUNDS:
        answers = engine.run(script, **changes)
        for item in script:
            own = [entry.logprob for entry in answers[item.rid].logprobs]
            check(model, item.prompt_ids, answers[item.rid].token_ids, own, f"{changes} {item.rid}", tolerance=5e-4)
        stats = engine.scheduler.stats()
        loaded.append((stats.host_hit_tokens_total > 0, stats.storage_hit_tokens_total > 0))
        storage = engine.worker.runner.kv_copies.storage
        until(lambda storage=storage: not storage.num_open)
    assert loaded[0] == (False, False) and loaded[1][0] and loaded[-1][1]


def test_the_ledger_has_the_bytes_of_the_tier(served: Any) -> None:
    engine, _ = served
    ledger, copies = engine.config.ledger, engine.worker.runner.kv_copies
    assert copies.num_bytes == ledger.bytes_of("host KV tier") + ledger.bytes_of("host tier of states")
    assert engine.config.host_snapshots == 4 * engine.config.num_snapshots


GROUPS = (
    StateGroup((0, 2), (StatePart((3, 5), "bfloat16"), StatePart((2, 4, 4), "float32"))),
    StateGroup((1,), (StatePart((7,)),)),
)


def copies_of(device: str, folder: Path) -> tuple[StatePool, KVCopies, list[KVReport]]:
    stream = DeviceStream(device)
    states = StatePool(GROUPS, 3, torch.bfloat16, stream, num_snapshots=4, num_positions=2)
    host = HostStates(5, states, stream)
    copies = KVCopies(KVPool(KVSpec.mla(1, 4, 2, torch.float32), 8, 1, stream), 8, stream, states=host)
    storage = FileStorage(str(folder))
    pages = SealedPages(storage, "pages", copies.host.width)
    copies.storage = StorageIO(
        copies.host, pages, 1, writes=True, states=(host, SealedPages(storage, "states", host.each_bytes))
    )
    reports: list[KVReport] = []
    copies.storage.report_to(reports.append)
    return states, copies, reports


def test_every_byte_of_a_state_comes_back(tmp_path: Path, device: str = "cpu") -> None:
    states, copies, reports = copies_of(device, tmp_path)
    before = []
    for part in states.tensors():
        bits = torch.randint(0, 256, (*part.shape[:-1], part.shape[-1] * part.itemsize), dtype=torch.uint8)
        part.view(torch.uint8).copy_(bits)
        before.append(bits)
    first = states.first_snapshot
    keys = [bytes([i]) * 20 for i in range(4)]
    ops = KVOps([1, 2, 3], [0, 1, 2], state_stores=[(1, 4), (3, 0)])
    ops.backups.extend((KVBackup(1, keys[:3], [0, 1, 2]), KVBackup(2, [keys[1]], [], 4), KVBackup(3, [keys[3]], [], 0)))
    copies.start(ops)
    assert [wait_for(reports, number) for number in (1, 2, 3)] == [3, 1, 1]
    copies.close()
    states, copies, reports = copies_of(device, tmp_path)
    fetches = [
        KVFetch(1, keys, []), KVFetch(2, keys, [], LAST_STATE), KVFetch(3, keys[:2], [5, 6], 2),
        KVFetch(4, keys[:1], [7], 3),
    ]  # fmt: skip
    copies.start(KVOps(fetches=fetches))
    found = [wait_for(reports, number) for number in (1, 2, 3, 4)]
    assert found == [3, 2, 2, 0]  # pages, pages with a state at their end, both read, no state
    copies.start(KVOps(loads=[KVLoad(1, [5, 6], [4, 5], [(2, 2)])]))
    copies.start(KVOps(arrived=[1]))
    copies.close()
    for part, bits in zip(states.tensors(), before):
        now = part.view(torch.uint8).cpu()
        assert torch.equal(now[:, first + 2], bits[:, first + 1])
        assert not now[:, : first + 2].any() and not now[:, first + 3 :].any()


def test_a_damaged_state_is_a_miss(tmp_path: Path) -> None:
    states, copies, reports = copies_of("cpu", tmp_path)
    key = b"k" * 20
    ops = KVOps([1], [0], state_stores=[(1, 4)])
    ops.backups.extend((KVBackup(1, [key], [0]), KVBackup(2, [key], [], 4)))
    copies.start(ops)
    assert wait_for(reports, 2) == wait_for(reports, 1) == 1
    (path,) = (p for p in tmp_path.rglob("*.kvpage") if p.name.startswith("states"))
    stored = bytearray(path.read_bytes())
    stored[-1 - random.randrange(states.snapshot_bytes)] ^= 1 << random.randrange(8)
    path.write_bytes(stored)
    copies.start(KVOps(fetches=[KVFetch(3, [key], [1], 2)]))
    assert wait_for(reports, 3) == 0 and not path.exists()
    copies.close()
