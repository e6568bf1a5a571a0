"""Seeds: drawn once, in the frontend, for every copy of a prompt; copies differ on every scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_engine import Engine
from moe_engine.frontend.frontend import Frontend, FrontendSettings
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.seeds import seed_of_copy
from tests.models.checkpoints import make_checkpoint
from tests.server.fake_engine import FakeClient
from tests.server.harness import get

SEEDS = st.integers(-(2**63), 2**64 - 1)
COPIES = st.integers(0, 127)
SAMPLED = {"temperature": 1.5, "max_new_tokens": 12, "ignore_eos": True}


def seeds_of(random_seed: int, *requests: dict[str, Any]) -> list[int]:
    """Seeds of the sequences of consecutive requests, by rid."""
    client = FakeClient()

    async def main() -> None:
        frontend = Frontend(client, client.tokenizer, FrontendSettings(random_seed=random_seed))
        for i, fields in enumerate(requests):
            await frontend.generate(GenerateInput(rid=f"{i:03}", **fields))

    asyncio.run(main())
    return [request.seed for request in sorted(client.requests, key=lambda request: request.rid)]


@given(SEEDS, COPIES.filter(bool), st.integers(-200, 200), COPIES)
def test_copies_differ_from_copies_of_nearby_seeds(seed: int, copy: int, distance: int, other: int) -> None:
    mixed = seed_of_copy(seed, copy)
    assert seed_of_copy(seed, 0) == seed and 0 <= mixed < 2**64 and mixed == seed_of_copy(seed, copy)
    if (distance, copy) != (0, other):
        assert mixed % 2**64 != seed_of_copy(seed + distance, other) % 2**64


@given(SEEDS, COPIES.filter(bool), st.integers(0, 63))
def test_copies_differ_in_about_half_of_their_bits(seed: int, copy: int, bit: int) -> None:
    """Sampling mixes seeds again, but the structure of clients' seeds is already removed here."""
    differing = (seed_of_copy(seed, copy) ^ seed_of_copy((seed ^ (1 << bit)) % 2**64, copy)).bit_count()
    assert 8 < differing < 56


def test_every_sequence_gets_its_own_seed_by_order() -> None:
    prompts = {"text": ["a", "b"], "sampling_params": {"n": 3, "max_new_tokens": 1}}
    greedy = {"text": "c", "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    once = seeds_of(5, prompts, greedy, prompts)
    assert len(set(once)) == len(once) == 13 and all(type(seed) is int for seed in once)
    assert once == seeds_of(5, prompts, greedy, prompts)
    assert not set(once) & set(seeds_of(6, prompts, greedy, prompts))


def test_client_seed_is_copy_0s_and_draws_none() -> None:
    plain = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    seeded = {"text": ["a", "b"], "sampling_params": {"n": 2, "sampling_seed": 7, "max_new_tokens": 1}}
    mixed = seeds_of(5, seeded, plain)
    assert mixed[:4] == [7, seed_of_copy(7, 1)] * 2  # each prompt of a batch has this seed
    assert mixed[4:] == seeds_of(5, plain)


def test_health_probe_draws_no_seed() -> None:
    client = FakeClient()
    assert get(client, "/health_generate").status_code == 200
    assert client.requests[0].seed == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("model"), seed=3)


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize(
    "parallel", [{"dp_size": 2}, {"tp_size": 2, "attn_dp_size": 2}], ids=["replicas", "attention groups"]
)
def test_copies_on_several_schedulers_are_different_samples(checkpoint: Path, parallel: dict[str, int]) -> None:
    options = {"dtype": "float32", "max_total_tokens": 1024, "cpu_threads": 1, "random_seed": 11, **parallel}
    answers = []
    for _ in range(2):
        with Engine(str(checkpoint), skip_tokenizer_init=True, **options) as engine:
            outs: Any = engine.generate(input_ids=[5, 6, 7], sampling_params={**SAMPLED, "n": 8})
            outs += [engine.generate(input_ids=[5, 6, 7], sampling_params=SAMPLED) for _ in range(4)]
            assert {out["meta_info"]["dp_rank"] for out in outs} == {0, 1}  # both groups have served
            answers.append([tuple(out["output_ids"]) for out in outs])
    assert len(set(answers[0])) == 12
    assert answers[0] == answers[1]
