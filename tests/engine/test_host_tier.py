"""The host-RAM tier with real kernels: sessions with evicted prefixes get the tokens of an engine without the tier."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_engine.core.kv_arrivals import KVArrivals
from moe_engine.core.transport import ZmqTransport
from moe_engine.errors import MoeEngineError
from moe_engine.scheduler.tiers.host_tier import HostTier
from moe_engine.types import KVLoad, KVOps
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_copies import KVCopies
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from tests.engine.harness import InProcessEngine, Scripted
from tests.speculation.agreeing import agreeing_checkpoint

LIMITS: dict[str, Any] = {
    "max_total_tokens": 160, "context_length": 96, "max_running_requests": 4, "chunked_prefill_size": 24,
    "dtype": "float32", "enable_hierarchical_cache": True, "hicache_ratio": 4,
}  # fmt: skip
CHAIN: dict[str, Any] = {
    "speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_num_draft_tokens": 3,
    "speculative_eagle_topk": 1,
}  # fmt: skip
OWN = "tests.engine.test_host_tier:OwnTier"
FORMS = {
    "plain": {},
    "pages, own classes": {"page_size": 4, "kv_connector": OWN},
    "chain": CHAIN,
    "ngram": {"speculative_algorithm": "NGRAM"},
}


class OwnCopies(KVCopies): ...


class OwnTier(HostTier):
    copies = "tests.engine.test_host_tier:OwnCopies"
    num_stores = 0

    def build_connector_meta(self) -> KVOps | None:
        ops = super().build_connector_meta()
        OwnTier.num_stores += ops is not None
        return ops


@pytest.fixture(scope="module", params=list(FORMS))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessEngine]:
    folder = tmp_path_factory.mktemp("tier")
    path = agreeing_checkpoint("deepseek_v3", folder / "model", 5, num_hidden_layers=2, num_mtp_layers=1)
    engine = InProcessEngine(path, folder / "board", **LIMITS, **FORMS[request.param])
    copies = type(engine.worker.runner.kv_copies).__name__
    assert copies == ("OwnCopies" if "own" in request.param else "KVCopies")
    yield engine
    if "own" in request.param:
        assert OwnTier.num_stores
    engine.close()


def sessions(seed: int, num: int = 5, turns: int = 3) -> list[Scripted]:
    """Each turn repeats the session's prompt and adds to it; the sessions together exceed the pool."""
    rng = random.Random(seed)
    texts = [[rng.randrange(5, 60) for _ in range(40)] for _ in range(num)]
    script = []
    for turn in range(turns):
        for i, text in enumerate(texts):
            text += [rng.randrange(5, 60) for _ in range(8)]
            script.append(Scripted(f"{i}.{turn}", list(text), 5, arrives=8 * len(script)))
    return script


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.each_value
def test_returning_sessions_get_the_same_tokens(engine: InProcessEngine, overlap: bool, mixed: bool) -> None:
    script = sessions(1)
    plain = engine.run(script, overlap=overlap, enable_mixed_chunk=mixed, host_tier_tokens=0)
    without = engine.scheduler.stats()
    tiered = engine.run(script, overlap=overlap, enable_mixed_chunk=mixed)
    stats = engine.scheduler.stats()
    assert {rid: answer.token_ids for rid, answer in tiered.items()} == {
        rid: answer.token_ids for rid, answer in plain.items()
    }
    assert stats.host_hit_tokens_total > 200 and without.host_hit_tokens_total == 0
    assert stats.cached_tokens_total > without.cached_tokens_total + 200


def test_aborts_while_copies_are_in_flight(engine: InProcessEngine) -> None:
    script = sessions(2)
    for i, item in enumerate(script):
        if i % 3 == 1:
            item.aborted_at = item.arrives + i % 4
    answers = engine.run(script)
    whole = engine.run(sessions(2), host_tier_tokens=0)
    for rid, answer in answers.items():
        assert answer.finish is not None and answer.token_ids == whole[rid].token_ids[: len(answer.token_ids)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("spec", ["mla", "gqa"])
def test_a_load_brings_back_what_was_stored(spec: str, dtype: torch.dtype) -> None:
    layout = KVSpec.mla(3, 4, 2, dtype) if spec == "mla" else KVSpec.gqa(3, 2, 4, dtype)
    stream = DeviceStream("cpu")
    pool, other = KVPool(layout, 16, 1, stream), KVPool(layout, 16, 1, stream)
    content = torch.randint(0, 255, (17, layout.bytes_per_token), dtype=torch.uint8)
    pool.write_rows(torch.arange(17), content)
    copies = KVCopies(pool, 8, stream)
    copies.start(KVOps(store_slots=[3, 9, 4], store_places=[5, 0, 7]))
    pool.write_rows(torch.arange(17), torch.zeros_like(content))
    copies.start(KVOps(loads=[KVLoad(1, [7, 5], [2, 16]), KVLoad(2, [0], [8])]))
    assert copies.take_done() == (1, 2) and copies.take_done() == ()
    found = pool.read_rows(torch.tensor([2, 16, 8, 1]))
    assert torch.equal(found[:3], content[[4, 3, 9]]) and not found[3].any()
    assert not other.read_rows(torch.arange(17)).any()


def test_a_failed_store_ends_the_core() -> None:
    """The places of a store count as valid once its step has run."""
    copies = KVCopies(KVPool(KVSpec.mla(1, 4, 2, torch.float32), 16, 1, DeviceStream("cpu")), 8, DeviceStream("cpu"))
    failed: Future[None] = Future()
    copies._copies = SimpleNamespace(run=lambda *args: failed)  # type: ignore[assignment]
    arrivals = KVArrivals(lambda: None)
    copies.listener = arrivals.report
    copies.start(KVOps(store_slots=[3], store_places=[5]))
    assert arrivals.take() == []
    failed.set_exception(RuntimeError("broken"))
    with pytest.raises(MoeEngineError, match="a store of KV failed: RuntimeError: broken"):
        arrivals.take()


def test_an_arrival_ends_the_wait_of_an_idle_core(tmp_path: Path) -> None:
    transport = ZmqTransport(f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out")
    arrivals = KVArrivals(transport.wake)
    arrivals.report(4, None)
    assert transport.receive(60) == [] and arrivals.take() == [4]
    assert transport.receive(0.01) == [] and arrivals.take() == []
    arrivals.report(5, RuntimeError("broken"))
    with pytest.raises(MoeEngineError, match="load 5 of KV failed: RuntimeError: broken"):
        arrivals.take()
    transport.close()
    arrivals.report(6, None)  # a thread of the storage may outlive the transport
    assert arrivals.take() == [6]
