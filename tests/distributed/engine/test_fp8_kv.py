"""An FP8 KV cache on several ranks: the tokens of one rank with such a cache.

Ranks sum in another order. A different last bit may rarely round to another 8-bit value. Two greedy answers may
therefore differ, but only where the two best tokens are nearly equal.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from moe_engine import Engine
from tests.distributed.engine.forms import ORDINARY, Answer, Wanted, serve
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")

NUM_TOKENS, EQUAL = 20, 0.02
"""`EQUAL`: nearness of log-probabilities; one eighth bit more or less moves them by about a tenth of that."""
FORMS: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2},
    "dp": {"tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": "all_to_all"},
}


def requests(rng: random.Random) -> list[Wanted]:
    prefix = [rng.randrange(ORDINARY) for _ in range(16)]
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    prompts = [prefix * (i % 2) + [rng.randrange(ORDINARY) for _ in range(rng.randint(1, 40))] for i in range(8)]
    return [Wanted(f"r{i}-", prompt, sampling, late=i == 7) for i, prompt in enumerate(prompts)]


def answers(path: Path, wanted: list[Wanted], **flags: Any) -> dict[str, Answer]:
    plain: dict[str, Any] = {"max_total_tokens": 2048, "max_running_requests": 8, "dtype": "float32"}
    with Engine(
        str(path), **plain, **flags, kv_cache_dtype="fp8_e4m3", cpu_threads=1, skip_tokenizer_init=True
    ) as engine:
        widths = engine.config.model
        assert engine.info.kv_bytes < 2049 * widths.num_layers * (32 + 8) * 2, "rows of a byte a channel, with scales"
        return asyncio.run(serve(engine, wanted))


def same(found: Answer, right: Answer) -> bool:
    for ours, theirs, our_best, best in zip(found.tokens, right.tokens, found.logprobs, right.logprobs, strict=True):
        if abs(our_best - best) > EQUAL:
            return False
        if ours != theirs:
            return True  # a tie; the texts differ from here on
    return True


def test_tokens_are_those_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seed = random.randrange(1 << 30)
    path, wanted = make_checkpoint("deepseek_v3", tmp_path / "model", seed=seed), requests(random.Random(seed))
    right = answers(path, wanted)
    for form, flags in FORMS.items():
        found = answers(path, wanted, **flags)
        parted = {rid: (found[rid], right[rid]) for rid in right if not same(found[rid], right[rid])}
        assert not parted, form
        equal = sum(found[rid].tokens == right[rid].tokens for rid in right)
        assert equal >= len(right) // 2, f"{form}: ties are rare, and {len(right) - equal} answers differ"
