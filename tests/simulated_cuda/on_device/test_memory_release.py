"""Memory that an engine on a simulated GPU releases beneath its tensors: the device has all of it, other tensors use
it, and the tokens are the same after it is back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.memory_release import MemoryRelease, ReleaseArgs, Tag
from tests.engine.harness import InProcessEngine
from tests.simulated_cuda.memory import MEMORY
from tests.simulated_cuda.on_device.test_engines import CHAIN, GREEDY, LIMITS, NONE, script, sometimes_warm
from tests.speculation.agreeing import agreeing_checkpoint

TAGS: list[list[Tag]] = [["kv_cache"], ["weights", "kv_cache"]]


def test_the_device_gets_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sometimes_warm(monkeypatch)
    path = agreeing_checkpoint("deepseek_v3", tmp_path / "model", 5, num_hidden_layers=2, num_mtp_layers=1)
    flags = LIMITS | NONE | CHAIN | {"disable_cuda_graph": True}
    engine = InProcessEngine(path, tmp_path / "board", device="cuda", dtype="float32", **flags)
    assert engine.worker.weights is not None
    release = MemoryRelease(engine.worker.runner, engine.worker.weights)
    try:
        before = engine.run(script([GREEDY, GREEDY]))
        for tags in TAGS:
            MEMORY.collect()
            used = MEMORY.used[0]
            released = release.release(ReleaseArgs(tags))
            MEMORY.collect()
            assert used - MEMORY.used[0] == sum(released.values()) and min(released.values()) > 0
            other = torch.full((1 << 16,), 7.0, device="cuda")
            release.resume(ReleaseArgs(tags))
            del other
            after = engine.run(script([GREEDY, GREEDY]))
            assert {rid: answer.token_ids for rid, answer in after.items()} == {
                rid: answer.token_ids for rid, answer in before.items()
            }
    finally:
        engine.close()


def test_cached_memory_is_free() -> None:
    """Memory that torch's allocator keeps after a large step refuses neither an update of weights nor a resume."""
    stream = DeviceStream("cuda")
    before, x = stream.free_bytes(), torch.empty(1 << 20, device="cuda")
    del x
    assert stream.free_bytes() == before


def test_tensors_over_a_resized_storage_stay() -> None:
    whole = torch.arange(10, device="cuda")
    part, storage = whole[2:5], whole.untyped_storage()
    storage.resize_(4 * 8)
    assert whole.untyped_storage().nbytes() == 32 and part[:2].tolist() == [2, 3]
    storage.resize_(0)
    assert not storage.data_ptr()
    storage.resize_(80)
    assert part.tolist() == [-1, -1, -1]  # undefined: poisoned
    torch.empty(0, dtype=torch.int64, device="cuda").set_(storage).zero_()
    assert part.tolist() == [0, 0, 0]
