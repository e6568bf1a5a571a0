"""Prompts above every limit, on ranks with limits for small steps: the answers of one rank.

`tests/scheduler/test_step_limits.py` generates many more forms and checks plans against their limits, without ranks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_engine import Engine
from tests.models.checkpoints import make_checkpoint
from tests.speculation.agreeing import agreeing_checkpoint

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(3)]

SEED = 11
LENGTHS = (380, 12, 75, 31, 140, 9, 64, 28, 21)  # 760 tokens
NUM_TOKENS = 12
LOW_LATENCY = {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all", "deepep_mode": "low_latency"}
TREE = {
    "speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 3,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "low latency alone": {**LOW_LATENCY, "max_running_requests": 256},
    "few tokens a rank, attention groups, mixed chunks, pages": {
        **LOW_LATENCY, "attn_dp_size": 2, "moe_a2a_backend": "shared_memory", "max_dispatch_tokens_per_rank": 24,
        "enable_mixed_chunk": True, "page_size": 8,
    },
    "a prompt as long as it is, two batches": {
        **LOW_LATENCY, "chunked_prefill_size": -1, "context_length": 448, "max_prefill_tokens": 64,
        "enable_two_batch_overlap": True, "moe_a2a_backend": "allgather",
    },
    "trees wider than their verification": {
        **LOW_LATENCY, **TREE, "deepep_mode": "auto", "chunked_prefill_size": 16, "max_running_requests": 9,
    },
    "several MTP layers": {
        **LOW_LATENCY, "speculative_algorithm": "NEXTN", "deepep_mode": "normal", "chunked_prefill_size": 128,
        "max_running_requests": 9,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("models")
    heads = {"num_attention_heads": 8, "max_position_embeddings": 512}
    for count in (1, 3):
        name = path / f"mtp{count}"
        agreeing_checkpoint("deepseek_v3", name, SEED, num_mtp_layers=count, num_key_value_heads=8, **heads)
    make_checkpoint("deepseek_v3", path / "plain", SEED, **heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield path


def answers(path: Path, **flags: Any) -> list[list[int]]:
    """Greedy answers to all prompts at once."""
    rng = random.Random(SEED)
    prompts = [[rng.randrange(250) for _ in range(length)] for length in LENGTHS]
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    common = {"max_total_tokens": 4096, "max_running_requests": 16, "dtype": "float32", "cpu_threads": 1}

    async def all_of(engine: Engine) -> list[list[int]]:
        asked = (engine.async_generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts)
        async with asyncio.timeout(240):
            return [answer["output_ids"] for answer in await asyncio.gather(*asked)]  # type: ignore[index]

    with Engine(str(path), **{**common, **flags}, skip_tokenizer_init=True) as engine:
        found = asyncio.run(all_of(engine))
        assert not any(engine._loop.run(engine._frontend.client.call("check_integrity")))
    return found


ALONE: dict[Path, list[list[int]]] = {}


@pytest.mark.parametrize("form", FORMS)
def test_no_step_exceeds_its_limits(folder: Path, form: str) -> None:
    name = {"trees wider than their verification": "mtp1", "several MTP layers": "mtp3"}.get(form, "plain")
    path = folder / name
    if path not in ALONE:
        ALONE[path] = answers(path)
    assert answers(path, **FORMS[form]) == ALONE[path]
