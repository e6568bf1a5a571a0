"""Drawn tokens follow the stated semantics, and only a row's own numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_engine.types import NewRow, SamplingParams
from moe_engine.worker import sampler as sampler_module
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampler import INVALID_TOKEN, SampledRows, Sampler, first_argmax
from moe_engine.worker.sampling_state import SamplingState, mix64, uniforms

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
    """The distribution in float64, by the book."""
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


def make(params: list[SamplingParams], vocab: int, seeds: list[int] | None = None) -> Sampler:
    state = SamplingState(len(params), vocab)
    for row, p in enumerate(params):
        seed = seeds[row] if seeds is not None else row
        state.enter(NewRow(row, "r", [1], 1, [], p, seed, frozenset()))
    return Sampler(state, STREAM)


def take(rows: list[int] | np.ndarray, lengths: list[int] | np.ndarray) -> SampledRows:
    rows = np.asarray(rows, dtype=np.int64)
    return SampledRows(rows, np.asarray(lengths, dtype=np.int64), torch.from_numpy(rows))


@pytest.mark.parametrize("values", PARAMS, ids=str)
def test_distribution(values: dict) -> None:
    params, vocab, draws = SamplingParams(**values), 12, 20_000
    logits = np.random.default_rng(1).normal(0, 1.5, vocab).astype(np.float32)
    sampler = make([params], vocab, [1234])
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
def test_large_vocabulary_token_by_token(values: dict, vocab: int, num_rows: int) -> None:
    """With the uniform number known, the token follows; sums in float32 may tip one near a boundary."""
    params = SamplingParams(**{"temperature": 1.0} | values)
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 2, (num_rows, vocab)).astype(np.float32))
    sampler = make([params] * num_rows, vocab)
    tokens = sampler.sample(logits, take(range(num_rows), [5] * num_rows)).numpy()
    u = uniforms(np.array([mix64(i) for i in range(num_rows)], dtype=np.uint64), np.full(num_rows, 5))
    in_order = not params.top_k > 0 and params.top_p == 1.0
    wrong = 0
    for row in range(num_rows):
        probs = reference(logits[row].numpy(), params)
        order = np.arange(vocab) if in_order else np.argsort(-logits[row].numpy(), kind="stable")
        expected = order[np.searchsorted(np.cumsum(probs[order]), u[row], side="right")]
        assert probs[tokens[row]] > 0
        wrong += expected != tokens[row]
    assert wrong <= 2


@pytest.mark.parametrize("at_once", [1 << 24, 7000])
def test_a_row_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(sampler_module, "MAX_ELEMENTS", at_once)
    vocab, generator = 2500, torch.Generator().manual_seed(0)
    params = [SamplingParams(**p) for p in PARAMS] + [SamplingParams(temperature=0.0), SamplingParams(top_k=300)]
    params += [SamplingParams(top_p=p, temperature=t) for p, t in ((0.999, 3.0), (0.5, 0.2), (0.7, 0.9), (0.6, 1.0))]
    logits = torch.randn(len(params), vocab, generator=generator) * 2
    lengths = np.arange(len(params)) + 10
    sampler = make(params, vocab)
    together = sampler.sample(logits, take(range(len(params)), lengths))
    alone = [int(sampler.sample(logits[i : i + 1].clone(), take([i], [lengths[i]]))) for i in range(len(params))]
    assert together.tolist() == alone
    shuffled = np.random.default_rng(0).permutation(len(params))
    again = make(params, vocab).sample(logits[shuffled], take(shuffled, lengths[shuffled]))  # a fresh sampler
    assert again.tolist() == together[shuffled].tolist()


def test_seed_and_position_make_the_number() -> None:
    seeds = np.array([mix64(s) for s in range(400)], dtype=np.uint64)
    grid = np.stack([uniforms(seeds, np.full(400, p)) for p in range(100)])
    assert grid.min() >= 0 and grid.max() < 1 and grid.dtype == np.float32
    assert len(np.unique(grid)) > 39_900
    assert abs(grid.mean() - 0.5) < 0.01
    for left, right in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.02


def test_numbers_stay_the_same_between_versions() -> None:
    assert mix64(0) == 0xE220A8397B1DCDAF  # splitmix64's first output, as published
    value = mix64((mix64(42) + 7 * 0x9E3779B97F4A7C15) % 2**64) >> 40
    assert uniforms(np.array([mix64(42)], dtype=np.uint64), np.array([7])).tolist() == [value * 2.0**-24]
    assert value * 2.0**-24 == 0.7347204089164734


def test_negative_and_huge_seeds() -> None:
    sampler = make([SamplingParams()] * 2, 8, [-1, 1 << 70])
    assert (sampler.sample(torch.zeros(2, 8), take([0, 1], [3, 3])) >= 0).all()


@pytest.mark.parametrize("vocab", [5, 1023, 1024, 1500, 4097])
def test_first_argmax(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(0, 6, (50, vocab), generator=generator).float()  # many ties
    value, index = first_argmax(logits)
    assert torch.equal(index, torch.from_numpy(logits.numpy().argmax(-1)))
    assert torch.equal(value, logits.amax(-1))
    logits[0, vocab - 1] = torch.nan
    logits[1, 2] = torch.nan
    assert first_argmax(logits)[0].isnan().tolist() == [True, True] + [False] * 48


@pytest.mark.parametrize("vocab", [12, 3000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_rows_fail_alone(bad: float, vocab: int) -> None:
    params = [SamplingParams(**p) for p in [*PARAMS, {"temperature": 0.0}, {"top_k": 300}] for _ in range(2)]
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(3))
    sampler, rows = make(params, vocab), take(range(len(params)), [4] * len(params))
    whole = sampler.sample(logits, rows)
    logits[::2, 7] = bad
    tokens = sampler.sample(logits, rows)
    assert (tokens[::2] == INVALID_TOKEN).all()
    assert torch.equal(tokens[1::2], whole[1::2])


def test_nothing_left_to_choose() -> None:
    params = [SamplingParams(**p) for p in [*PARAMS, {"temperature": 0.0}]]
    logits = torch.full((len(params), 12), -torch.inf)
    tokens = make(params, 12).sample(logits, take(range(len(params)), [0] * len(params)))
    assert (tokens == INVALID_TOKEN).all()


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((4000, 6), -torch.inf)
    logits[:, 3] = 0.0
    for values in PARAMS:
        sampler = make([SamplingParams(**values)], 6)
        tokens = sampler.sample(logits, take(np.zeros(4000, dtype=np.int64), np.arange(4000)))
        assert (tokens == 3).all()


def test_entering_a_sampled_request_ends_the_greedy_way() -> None:
    state = SamplingState(2, 4)
    sampler = Sampler(state, STREAM)
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
