"""The host-RAM tier on a simulated GPU: copies run concurrently with steps, without races, and wake the core."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.types import KVLoad, KVOps
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache import kv_copies
from moe_engine.worker.kv_cache.kv_copies import KVCopies
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from tests.engine import test_state_tier, test_window_tier
from tests.engine.harness import InProcessEngine
from tests.engine.test_host_tier import CHAIN, LIMITS, sessions
from tests.simulated_cuda import streams
from tests.simulated_cuda.on_device.test_engines import NONE
from tests.speculation.agreeing import agreeing_checkpoint


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_load_brings_back_what_was_stored(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, layout = DeviceStream("cuda"), KVSpec.gqa(3, 2, 4, torch.float32)
    monkeypatch.setattr(kv_copies, "COPY_BYTES", at_once * layout.bytes_per_token)
    pool = KVPool(layout, 16, 1, stream)
    content = torch.randint(0, 255, (17, layout.bytes_per_token), dtype=torch.uint8)
    every = stream.from_list(range(17), torch.int64)
    pool.write_rows(every, stream.upload(content))
    copies, done = KVCopies(pool, 8, stream), []
    copies.listener = lambda load, error: done.append((load, error))
    streams.waits.clear()
    copies.start(KVOps(store_slots=[3, 9, 4, 1, 2], store_places=[5, 6, 7, 0, 2]))
    if at_once == 100:
        own = threading.current_thread().name
        assert [wait for wait in streams.waits if wait.thread == own] == []
    pool.write_rows(every, stream.upload(torch.zeros_like(content)))
    copies.start(KVOps(loads=[KVLoad(1, [7, 5], [2, 16])]))
    copies.start(KVOps(loads=[KVLoad(2, [0, 6, 2], [8, 1, 9])]))
    copies.start(KVOps(arrived=[1, 2]))
    found = stream.read(pool.read_rows(stream.from_list([2, 16, 8, 1, 9, 4], torch.int64)))
    copies.close()
    assert done == [(1, None), (2, None)]
    assert torch.equal(torch.from_numpy(found[:5]), content[[4, 3, 1, 9, 2]]) and not found[5].any()


def test_every_byte_of_a_state_comes_back(tmp_path: Path) -> None:
    test_state_tier.test_every_byte_of_a_state_comes_back(tmp_path, "cuda")


def test_every_byte_of_a_window_comes_back() -> None:
    test_window_tier.test_every_byte_of_a_window_comes_back("page_first", "cuda")


@pytest.mark.parametrize("flags", [{}, CHAIN], ids=["plain", "chain"])
def test_returning_sessions_get_the_same_tokens(flags: dict[str, Any], tmp_path: Path) -> None:
    path = agreeing_checkpoint("deepseek_v3", tmp_path / "model", 5, num_hidden_layers=2, num_mtp_layers=1)
    engine = InProcessEngine(path, tmp_path / "board", **LIMITS, **NONE, **flags)
    script = sessions(1, turns=2)
    plain = engine.run(script, host_tier_tokens=0)
    tiered = engine.run(script)
    stats = engine.scheduler.stats()
    engine.close()
    assert {rid: a.token_ids for rid, a in tiered.items()} == {rid: a.token_ids for rid, a in plain.items()}
    assert stats.host_hit_tokens_total > 40
