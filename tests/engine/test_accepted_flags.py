"""Random flags: a combination is refused at launch, or gives the tokens of a default launch.

Each run has new flags (`MOE_TEST_SEED` repeats them). Flags that change tokens by design are omitted.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from moe_engine.errors import ConfigError
from tests.engine.harness import Answer, InProcessEngine, Scripted
from tests.speculation.agreeing import agreeing_checkpoint

NUM_DRAWS = 14
VOCAB = 250
MAX_NEW_TOKENS = 12
VALUES: dict[str, tuple[Any, ...]] = {
    "chunked_prefill_size": (-1, 1, 16, 33, 4096),
    "max_prefill_tokens": (16, 100, 16384),
    "max_running_requests": (1, 2, 5, 24),
    "max_total_tokens": (160, 512, 4096),
    "context_length": (128, 200, 512),
    "page_size": (1, 2, 16, 64),
    "schedule_policy": ("fcfs", "lpm", "lof", "random", "dfs-weight"),
    "schedule_conservativeness": (0.0, 0.3, 1.0),
    "disable_radix_cache": (False, True),
    "disable_overlap_schedule": (False, True),
    "enable_mixed_chunk": (False, True),
    "enable_priority_scheduling": (False, True),
    "max_queued_requests": (None, 64),
    "request_waiting_timeout": (None, 600.0),
    "request_running_timeout": (None, 600.0),
    "prefill_max_requests": (None, 1, 3),
    "prefill_decode_interval": (0, 2),
    "enable_prefill_delayer": (False, True),
    "attention_backend": (None, "torch", "cpu"),
    "moe_runner_backend": ("auto", "torch", "cpu"),
    "sampling_backend": (None, "torch", "cpu"),
    "enable_deterministic_inference": (False, True),
    "cpu_threads": (None, 1, 2),
    "speculative_algorithm": (None, None, "NEXTN", "NGRAM", "STANDALONE"),
    "speculative_num_steps": (None, 1, 2, 5),
    "speculative_eagle_topk": (None, 1, 3),
    "speculative_num_draft_tokens": (None, 1, 3, 6),
    "max_logprobs": (0, 20, 100),
    "mem_fraction_static": (None, 0.2, 0.9),
    "random_seed": (None, 7),
}


def draw(rng: random.Random) -> dict[str, Any]:
    """Some flags with values; the others keep their defaults."""
    names = rng.sample(sorted(VALUES), rng.randint(3, 12))
    flags = {name: rng.choice(VALUES[name]) for name in names}
    return {name: value for name, value in flags.items() if value is not None}


def script(rng: random.Random, longest: int) -> list[Scripted]:
    prefix = [rng.randrange(VOCAB) for _ in range(longest // 2)]
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest // 2))] for _ in range(7)]
    prompts = [prefix + prompt if i % 3 == 0 else prompt for i, prompt in enumerate(prompts)]
    greedy = {"temperature": 0, "ignore_eos": True}
    return [
        Scripted(str(i), prompt, MAX_NEW_TOKENS, arrives=rng.randrange(6), sampling=greedy)
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed = random.randrange(2**31)
    return agreeing_checkpoint("deepseek_v3", tmp_path_factory.mktemp("model") / "model", seed, num_mtp_layers=1)


def serve(path: Path, board: Path, requests: list[Scripted], **flags: Any) -> dict[str, Answer]:
    engine = InProcessEngine(path, board, dtype="float32", **flags)
    try:
        return engine.run(requests, overlap=not flags.get("disable_overlap_schedule", False))
    finally:
        engine.close()


def test_accepted_flags_serve_the_tokens_of_a_plain_launch(checkpoint: Path, tmp_path: Path) -> None:
    rng = random.Random(random.randrange(2**31))
    requests = script(rng, longest=100)
    plain = serve(checkpoint, tmp_path / "plain", requests, max_total_tokens=4096)
    served = refused = 0
    while served < NUM_DRAWS:
        flags = draw(rng)
        try:
            answers = serve(checkpoint, tmp_path / f"board{served + refused}", requests, **flags)
        except ConfigError as error:
            refused += 1
            assert "--" in str(error), (flags, error)  # the message names a flag
            assert refused < 30 * NUM_DRAWS
            continue
        served += 1
        for item in requests:
            answer = answers[item.rid]
            assert answer.finish is not None
            if (
                answer.finish["type"] == "abort"
            ):  # too long for the context or the pool: refused by name, before any step
                assert answer.finish.get("status_code") == 400, (flags, answer.finish)
            else:
                assert answer.token_ids == plain[item.rid].token_ids, (flags, item.rid)
