"""The same tokens, bit for bit in float32, for any other requests and any division into steps.

The reference runs each request alone, its prompt in one chunk, without prefix cache and overlap. Log-probabilities are
compared bit for bit where one form of attention serves all phases (`--enable-deterministic-inference`).
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.harness import Answer, InProcessEngine, Scripted
from tests.examples import examples
from tests.models.checkpoints import make_checkpoint

VOCAB = 250  # below the special tokens
CUTS = ((16, 4, True, True, 256), (48, 1, False, False, 512), (-1, 16, True, False, 1008))
"""Chunk size, page size, overlap, mixed chunk, slots."""
PLAIN = {"disable_radix_cache": True, "chunked_prefill_size": -1, "overlap": False}


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    path = make_checkpoint(request.param, folder / "model", seed=random.randrange(2**31))
    engine = InProcessEngine(
        path,
        Path(folder / "status"),
        dtype="float32",
        page_size=16,
        max_total_tokens=4096,
        max_running_requests=16,
        enable_deterministic_inference=True,
    )
    yield engine
    engine.close()


def make_script(rng: random.Random, count: int, *, shared: bool, spread: int) -> list[Scripted]:
    prefix = [rng.randrange(VOCAB) for _ in range(rng.choice([5, 33, 70]))]
    script = []
    for i in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))]
        sampled = rng.random() < 0.4
        script.append(
            Scripted(
                rid=f"r{i}-",
                prompt_ids=(prefix + own) if shared and rng.random() < 0.7 else own,
                max_new_tokens=rng.randint(1, 24),
                arrives=rng.randint(0, spread),
                sampling={"temperature": 0.8, "top_p": 0.95, "ignore_eos": True} if sampled else {"temperature": 0.0},
                seed=rng.getrandbits(40),
                logprob=True,
            )
        )
    return script


def alone(engine: InProcessEngine, script: list[Scripted]) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for item in script:
        answers |= engine.run([Scripted(**{**item.__dict__, "arrives": 0, "aborted_at": None})], **PLAIN)
    return answers


def check_same(found: dict[str, Answer], expected: dict[str, Answer], script: list[Scripted]) -> None:
    for item in script:
        got, want = found[item.rid], expected[item.rid]
        if item.aborted_at is not None and got.finish is not None and got.finish["type"] == "abort":
            count = len(got.token_ids)
            assert got.token_ids == want.token_ids[:count]
            assert got.logprobs == want.logprobs[:count]
            continue
        assert got.token_ids == want.token_ids, item.rid
        assert got.logprobs == want.logprobs, item.rid
        assert got.finish == want.finish


@settings(max_examples=examples(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 4, 16]),
    chunk=st.sampled_from([-1, 16, 48, 64]),
    mixed=st.booleans(),
    overlap=st.booleans(),
    radix=st.booleans(),
    policy=st.sampled_from(["fcfs", "lpm", "dfs-weight", "lof", "random"]),
    pool_pages=st.sampled_from([12, 16, 256]),
    aborts=st.booleans(),
)
def test_outputs_do_not_depend_on_the_batch(
    engine: InProcessEngine,
    seed: int,
    page_size: int,
    chunk: int,
    mixed: bool,
    overlap: bool,
    radix: bool,
    policy: str,
    pool_pages: int,
    aborts: bool,
) -> None:
    rng = random.Random(seed)
    script = make_script(rng, rng.randint(2, 10), shared=True, spread=20)
    if aborts:
        for item in rng.sample(script, len(script) // 3):
            item.aborted_at = item.arrives + rng.randint(1, 30)
    found = engine.run(
        script,
        overlap=overlap,
        num_slots=16 * pool_pages,
        page_size=page_size,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=mixed and chunk > 0,
        disable_radix_cache=not radix,
        policy=policy if radix or policy not in ("lpm", "dfs-weight") else "fcfs",
        schedule_conservativeness=0.1,
    )
    check_same(found, alone(engine, script), script)


@pytest.mark.parametrize("row", ["auto", "torch"])
def test_tokens_with_both_forms_of_attention(tmp_path: Path, row: str) -> None:
    """With the default launch, or without a compiler: prompts expanded, decodes absorbed. Rounding differs, tokens are
    equal."""
    rng = random.Random(19)
    path = make_checkpoint("deepseek_v3", tmp_path / "model", seed=19)
    flags = {"dtype": "float32", "max_total_tokens": 1024, "max_running_requests": 16}
    flags |= dict.fromkeys(("attention_backend", "moe_runner_backend", "linear_backend", "ops_backend"), row)
    engine = InProcessEngine(path, tmp_path / "status", **flags)
    script = make_script(rng, 12, shared=True, spread=20)
    try:
        expected = alone(engine, script)
        for chunk, page, overlap, mixed, slots in CUTS:
            limits = {"chunked_prefill_size": chunk, "page_size": page, "enable_mixed_chunk": mixed, "num_slots": slots}
            found = engine.run(script, overlap=overlap, policy="lpm", **limits)
            for item in script:
                assert found[item.rid].token_ids == expected[item.rid].token_ids
    finally:
        engine.close()


def test_retraction_changes_nothing(engine: InProcessEngine) -> None:
    """A pool so small that running requests are retracted."""
    rng = random.Random(7)
    script = [
        Scripted(f"r{i}-", [rng.randrange(VOCAB) for _ in range(20)], 40, sampling={"temperature": 0.0}, logprob=True)
        for i in range(8)
    ]  # fmt: skip
    found = engine.run(script, num_slots=192, page_size=1, schedule_conservativeness=0.0, retract_decode_steps=1)
    assert sum(answer.retractions for answer in found.values()) > 0
    check_same(found, alone(engine, script), script)


def test_prefix_cache_is_used(engine: InProcessEngine) -> None:
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(64)]
    script = [Scripted(f"r{i}-", [*shared, i + 1, i + 2], 4, arrives=i, logprob=True) for i in range(4)]
    found = engine.run(script)
    assert found["r0-"].cached_tokens == 0
    assert all(found[f"r{i}-"].cached_tokens >= 64 for i in range(1, 4))
    check_same(found, alone(engine, script), script)
