"""Host tier with windows of its own: answers equal transformers', over evictions; bytes over device and host."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moe_engine.types.kv_ops import KVLoad, KVOps
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_copies import KVCopies
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from tests.engine.harness import InProcessEngine
from tests.engine.test_state_tier import turns
from tests.engine.test_states import check
from tests.engine.test_windows import ALTERNATING, FLAGS, check_bounded, load
from tests.models.checkpoints import make_checkpoint


def test_windows_come_back_from_the_host_tier(tmp_path: Path) -> None:
    """Sessions that exceed the pools, with every write policy; bytes of the tier."""
    seed = random.randrange(2**31)
    path = make_checkpoint("qwen3", tmp_path / "model", seed=seed, **ALTERNATING, sliding_window=9)
    flags = FLAGS | {"max_total_tokens": 160, "max_running_requests": 2, "chunked_prefill_size": 16, "page_size": 4}
    tier = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
    engine = InProcessEngine(path, tmp_path / "status", **flags, **tier)
    model, script = load(path), turns(random.Random(seed))
    try:
        check_bounded(engine, engine.config.model.windowed_layers)
        ledger, copies = engine.config.ledger, engine.worker.runner.kv_copies
        assert copies.num_bytes == ledger.bytes_of("host KV tier") + ledger.bytes_of("host tier of windows")
        loaded = []
        for policy in ("", "write_back", "write_through"):
            changes = {"hicache_write_policy": policy} if policy else {"host_tier_tokens": 0}
            answers = engine.run(script, **changes)
            for item in script:
                own = [entry.logprob for entry in answers[item.rid].logprobs]
                check(model, item.prompt_ids, answers[item.rid].token_ids, own, f"seed {seed} {item.rid} {policy}")
            loaded.append(engine.scheduler.stats().host_hit_tokens_total)
        assert loaded[0] == 0 and min(loaded[1:]) > 100
    finally:
        engine.close()


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_every_byte_of_a_window_comes_back(layout: str, device: str = "cpu") -> None:
    """Layers 0 and 2 have windows; pages of two tokens."""
    stream = DeviceStream(device)
    pool = KVPool(KVSpec.mla(3, 4, 2, torch.float32), 8, 2, stream, windowed=(0, 2), num_window_slots=6)
    copies = KVCopies(pool, 8, stream, layout=layout, num_window_slots=10)
    rows, windows = (
        torch.randint(0, 256, (10, 24), dtype=torch.uint8),
        torch.randint(0, 256, (8, 48), dtype=torch.uint8),
    )
    assert (sum(pool.row_widths), sum(pool.window_widths)) == (24, 48)
    pool.write_rows(stream.upload(torch.arange(10)), stream.upload(rows))
    pool.write_windows(stream.upload(torch.arange(8)), stream.upload(windows))
    copies.start(KVOps([2, 3, 6, 7], [0, 1, 6, 7], window_stores=[(4, 3), (2, 0)]))
    pool.write_rows(stream.upload(torch.arange(10)), stream.upload(torch.zeros_like(rows)))
    pool.write_windows(stream.upload(torch.arange(8)), stream.upload(torch.zeros_like(windows)))
    copies.start(KVOps(loads=[KVLoad(1, [6, 7], [4, 5], windows=[(0, 6)]), KVLoad(2, [], [], windows=[(3, 2)])]))
    copies.start(KVOps(arrived=[1, 2]))
    found = torch.from_numpy(stream.read(pool.read_rows(stream.upload(torch.arange(10)))))
    kept = torch.from_numpy(stream.read(pool.read_windows(stream.upload(torch.arange(8)))))
    copies.close()
    assert torch.equal(found[4:6], rows[6:8]) and not found[:4].any() and not found[6:].any()
    assert torch.equal(kept[6:8], windows[2:4]) and torch.equal(kept[2:4], windows[4:6])
    assert not kept[:2].any() and not kept[4:6].any()
    assert copies.num_bytes == 8 * 24 + 10 * 48
