"""Sampled tokens follow the documented semantics, and depend only on the row's own parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_engine.kernels import backends
from moe_engine.kernels.device import Need, cpu_device
from moe_engine.kernels.sampling import reference as reference_module
from moe_engine.kernels.sampling.protocol import SamplingKernel
from moe_engine.kernels.sampling.reference import TorchSampling
from moe_engine.types import NewRow, SamplingParams
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.sampler import INVALID_TOKEN, SampledRows, Sampler
from moe_engine.worker.sampling.sampling_state import SamplingState, mix64, uniforms

STREAM = DeviceStream("cpu")
CHI_SQUARE_LIMIT = 45.0  # far above the 99.99 % quantile for 11 degrees of freedom (37.4)

PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"temperature": 0.8, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 6, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 8, "top_p": 0.95, "min_p": 0.15},
    {"temperature": 0.9, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 1.1, "top_k": 100, "top_p": 0.6},
    {"temperature": 2.0, "top_p": 1e-9},
]


def reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution by definition, in float64."""
    scaled = logits.astype(np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    kept = probs[order]
    if params.top_k > 0:
        kept[params.top_k :] = 0
    kept /= kept.sum()
    before = np.concatenate([[0.0], np.cumsum(kept)[:-1]])
    keep = before < params.top_p
    keep &= kept >= params.min_p * kept[0]
    kept = np.where(keep, kept, 0)
    out = np.zeros_like(probs)
    out[order] = kept / kept.sum()
    return out


@pytest.fixture(params=["torch", "cpu"])
def kernel(request: pytest.FixtureRequest) -> SamplingKernel:
    try:
        chosen = backends.plan_kernels(cpu_device(), Need("float32"), {"sampling": request.param})
    except ValueError as error:
        pytest.skip(str(error))
    return chosen.choices[-1].build()


def make(kernel: SamplingKernel, params: list[SamplingParams], vocab: int, seeds: list[int] | None = None) -> Sampler:
    state = SamplingState(len(params), vocab)
    for row, p in enumerate(params):
        seed = seeds[row] if seeds is not None else row
        state.enter(NewRow(row, "r", [1], 1, [], p, seed, frozenset()))
    return Sampler(state, STREAM, kernel)


def take(rows: list[int] | np.ndarray, lengths: list[int] | np.ndarray) -> SampledRows:
    rows = np.asarray(rows, dtype=np.int64)
    return SampledRows(rows, np.asarray(lengths, dtype=np.int64), torch.from_numpy(rows))


@pytest.mark.parametrize("values", PARAMS, ids=str)
def test_distribution(kernel: SamplingKernel, values: dict) -> None:
    params, vocab, draws = SamplingParams(**values), 12, 20_000
    logits = np.random.default_rng(1).normal(0, 1.5, vocab).astype(np.float32)
    sampler = make(kernel, [params], vocab, [1234])
    rows = take(np.zeros(draws, dtype=np.int64), np.arange(draws))
    tokens = sampler.sample(torch.from_numpy(logits).expand(draws, vocab).contiguous(), rows)
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    expected = reference(logits, params) * draws
    assert (counts[expected == 0] == 0).all()
    seen = expected > 0
    assert ((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum() < CHI_SQUARE_LIMIT


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 0.9, "temperature": 0.3},
        {"top_p": 0.98, "temperature": 2.0},
        {"top_k": 2000, "top_p": 0.95},
        {"top_k": 700, "top_p": 0.99},
        {"top_k": 50, "min_p": 0.01},
        {"min_p": 0.02},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize(("vocab", "num_rows"), [(3000, 64), (20_000, 16)])
def test_large_vocabulary_token_by_token(kernel: SamplingKernel, values: dict, vocab: int, num_rows: int) -> None:
    """With a known uniform number the token is known; float32 sums may change a token near a boundary."""
    params = SamplingParams(**{"temperature": 1.0} | values)
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 2, (num_rows, vocab)).astype(np.float32))
    sampler = make(kernel, [params] * num_rows, vocab)
    tokens = sampler.sample(logits, take(range(num_rows), [5] * num_rows)).numpy()
    u = uniforms(np.array([mix64(i) for i in range(num_rows)], dtype=np.uint64), np.full(num_rows, 5))
    wrong = 0
    for row in range(num_rows):
        probs = reference(logits[row].numpy(), params)
        expected = np.searchsorted(np.cumsum(probs), u[row], side="right")
        assert probs[tokens[row]] > 0
        wrong += expected != tokens[row]
    assert wrong <= 2


@pytest.mark.parametrize("at_once", [1 << 24, 7000])
def test_a_row_does_not_depend_on_its_neighbors(
    kernel: SamplingKernel, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(reference_module, "CACHED_ELEMENTS", at_once)
    vocab, generator = 2500, torch.Generator().manual_seed(0)
    params = [SamplingParams(**p) for p in PARAMS] + [SamplingParams(temperature=0.0), SamplingParams(top_k=300)]
    params += [SamplingParams(top_p=p, temperature=t) for p, t in ((0.999, 3.0), (0.5, 0.2), (0.7, 0.9), (0.6, 1.0))]
    logits = torch.randn(len(params), vocab, generator=generator) * 2
    lengths = np.arange(len(params)) + 10
    sampler = make(kernel, params, vocab)
    together = sampler.sample(logits, take(range(len(params)), lengths))
    alone = [int(sampler.sample(logits[i : i + 1].clone(), take([i], [lengths[i]]))) for i in range(len(params))]
    assert together.tolist() == alone
    shuffled = np.random.default_rng(0).permutation(len(params))
    again = make(kernel, params, vocab).sample(logits[shuffled], take(shuffled, lengths[shuffled]))  # a fresh sampler
    assert again.tolist() == together[shuffled].tolist()


def test_seed_and_position_make_the_number() -> None:
    seeds = np.array([mix64(s) for s in range(400)], dtype=np.uint64)
    grid = np.stack([uniforms(seeds, np.full(400, p)) for p in range(100)])
    assert grid.min() >= 0 and grid.max() < 1 and grid.dtype == np.float32
    assert len(np.unique(grid)) > 39_900
    assert abs(grid.mean() - 0.5) < 0.01
    for left, right in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.02


def test_another_salt_is_another_stream() -> None:
    seeds, positions = np.array([mix64(s) for s in range(3000)], dtype=np.uint64), np.arange(3000)
    streams = np.stack([uniforms(seeds, positions, salt) for salt in range(4)])
    assert (streams[0] == uniforms(seeds, positions)).all()
    assert np.abs(np.corrcoef(streams) - np.eye(4)).max() < 0.08  # 4 standard deviations
    assert np.abs(streams.mean(1) - 0.5).max() < 0.025
    sampler = make(TorchSampling(), [SamplingParams()] * 3, 8)
    found = sampler.uniforms(take([2, 0], [9, 4]), 7)
    assert found.tolist() == uniforms(np.array([mix64(2), mix64(0)], dtype=np.uint64), np.array([9, 4]), 7).tolist()


def test_numbers_stay_the_same_between_versions() -> None:
    assert mix64(0) == 0xE220A8397B1DCDAF  # splitmix64's first output, as published
    value = mix64((mix64(42) + 7 * 0x9E3779B97F4A7C15) % 2**64) >> 40
    assert uniforms(np.array([mix64(42)], dtype=np.uint64), np.array([7])).tolist() == [value * 2.0**-24]
    assert value * 2.0**-24 == 0.7347204089164734


def test_negative_and_huge_seeds(kernel: SamplingKernel) -> None:
    sampler = make(kernel, [SamplingParams()] * 2, 8, [-1, 1 << 70])
    assert (sampler.sample(torch.zeros(2, 8), take([0, 1], [3, 3])) >= 0).all()


@pytest.mark.parametrize("vocab", [12, 3000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_rows_fail_alone(kernel: SamplingKernel, bad: float, vocab: int) -> None:
    params = [SamplingParams(**p) for p in [*PARAMS, {"temperature": 0.0}, {"top_k": 300}] for _ in range(2)]
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(3))
    sampler, rows = make(kernel, params, vocab), take(range(len(params)), [4] * len(params))
    whole = sampler.sample(logits, rows)
    logits[::2, 7] = bad
    tokens = sampler.sample(logits, rows)
    assert (tokens[::2] == INVALID_TOKEN).all()
    assert torch.equal(tokens[1::2], whole[1::2])


def test_nothing_left_to_choose(kernel: SamplingKernel) -> None:
    params = [SamplingParams(**p) for p in [*PARAMS, {"temperature": 0.0}]]
    logits = torch.full((len(params), 12), -torch.inf)
    tokens = make(kernel, params, 12).sample(logits, take(range(len(params)), [0] * len(params)))
    assert (tokens == INVALID_TOKEN).all()


def test_masked_tokens_are_never_drawn(kernel: SamplingKernel) -> None:
    logits = torch.full((4000, 6), -torch.inf)
    logits[:, 3] = 0.0
    for values in PARAMS:
        sampler = make(kernel, [SamplingParams(**values)], 6)
        tokens = sampler.sample(logits, take(np.zeros(4000, dtype=np.int64), np.arange(4000)))
        assert (tokens == 3).all()


def test_entering_a_sampled_request_ends_the_greedy_way(kernel: SamplingKernel) -> None:
    state = SamplingState(2, 4)
    sampler = Sampler(state, STREAM, kernel)
    rows = take([0, 1], [1, 1])
    state.enter(NewRow(0, "a", [1], 1, [], SamplingParams(temperature=0.0), 0, frozenset()))
    state.enter(NewRow(1, "b", [1], 1, [], SamplingParams(temperature=0.0), 0, frozenset()))
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 2)
    assert sampler.sample(logits, rows).tolist() == [1, 1]
    state.enter(NewRow(1, "c", [1], 1, [], SamplingParams(temperature=100.0), 0, frozenset()))
    drawn = {
        int(sampler.sample(logits, SampledRows(rows.rows, rows.lengths + i, rows.rows_device))[1]) for i in range(50)
    }
    assert drawn == {0, 1, 2, 3}


def test_a_row_may_come_several_times(kernel: SamplingKernel) -> None:
    """The nodes of a draft tree: each samples as its row would at that length, independent of the other rows."""
    params, vocab = [SamplingParams(**p) for p in PARAMS] + [SamplingParams(temperature=0.0)], 700
    generator = np.random.default_rng(8)
    rows, lengths = generator.integers(0, len(params), 60), generator.integers(1, 30, 60)
    logits = torch.from_numpy(generator.normal(0, 2, (60, vocab)).astype(np.float32))
    sampler = make(kernel, params, vocab)
    tree = take(rows, lengths)
    tokens, asked = sampler.sample(logits, tree), torch.randint(0, vocab, (60, 3))
    found = sampler.probabilities(logits, tree, asked)
    for i in range(60):
        one = take([rows[i]], [lengths[i]])
        assert sampler.sample(logits[i : i + 1], one).tolist() == tokens[i : i + 1].tolist()
        assert torch.equal(sampler.probabilities(logits[i : i + 1], one, asked[i : i + 1]), found[i : i + 1])
    assert torch.equal(sampler.sample(logits, tree), tokens)


@pytest.mark.parametrize("values", PARAMS, ids=str)
def test_probabilities(kernel: SamplingKernel, values: dict) -> None:
    params, vocab = SamplingParams(**values), 12
    logits = np.random.default_rng(6).normal(0, 1.5, (3, vocab)).astype(np.float32)
    asked = torch.cat([torch.arange(vocab), torch.tensor([-1, -7])]).expand(3, -1)
    sampler = make(kernel, [params], vocab)
    found = sampler.probabilities(torch.from_numpy(logits), take([0, 0, 0], [1, 2, 3]), asked)
    assert found.dtype == torch.float32
    for row in range(3):
        np.testing.assert_allclose(found[row, :vocab].numpy(), reference(logits[row], params), atol=1e-6)
    assert (found[:, vocab:] == 0).all()


def test_probabilities_of_greedy_rows(kernel: SamplingKernel) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 1.0], [torch.nan, 1.0, 1.0]])
    asked = torch.tensor([[1, 2, -1]] * 3)
    wanted = [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    greedy, sampled = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
    alone = make(kernel, [greedy] * 3, 3).probabilities(logits, take([0, 1, 2], [1, 1, 1]), asked)
    assert alone.tolist() == wanted
    logits, asked = torch.cat([logits, torch.zeros(1, 3)]), torch.cat([asked, asked[:1]])
    mixed = make(kernel, [greedy] * 3 + [sampled], 3).probabilities(logits, take([0, 1, 2, 3], [1, 1, 1, 1]), asked)
    assert mixed[:3].tolist() == wanted
    assert mixed[3].tolist() == pytest.approx([1 / 3, 1 / 3, 0])


def test_entering_a_request_changes_what_is_gathered(kernel: SamplingKernel) -> None:
    """Steps of the same rows share gathered parameters until a row is added."""
    state = SamplingState(2, 4)
    sampler = Sampler(state, STREAM, kernel)
    for row in range(2):
        state.enter(NewRow(row, "old", [1], 1, [], SamplingParams(temperature=1.0), 0, frozenset()))
    rows, logits = take([0, 1], [1, 1]), torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 2)
    asked = torch.arange(4).expand(2, -1)
    before = sampler.probabilities(logits, rows, asked)
    assert (before > 0).all()
    state.enter(NewRow(1, "new", [1], 1, [], SamplingParams(top_k=2, temperature=1.0), 0, frozenset()))
    after = sampler.probabilities(logits, rows, asked)
    assert torch.equal(after[0], before[0]) and (after[1] > 0).tolist() == [False, False, True, True]
