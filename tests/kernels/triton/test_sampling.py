"""Sampling in Triton, under the interpreter, against the definition (float64, sorted) and token by token against
torch."""

from __future__ import annotations

import random

import pytest
import torch

from moe_engine.kernels.sampling.protocol import INVALID_TOKEN
from moe_engine.kernels.sampling.reference import TorchSampling
from tests.kernels.cpu.test_sampling import HIGHEST, PARAMETERS, SHAPES, check, draw_logits, given

pytestmark = pytest.mark.drawn(13)

triton_sampling = pytest.importorskip("moe_engine.kernels.sampling.triton_sampling", reason="needs triton")
triton_greedy = pytest.importorskip("moe_engine.kernels.sampling.triton_greedy", reason="needs triton")
row_programs = pytest.importorskip("moe_engine.kernels.sampling.row_programs", reason="needs triton")
EVERY_WAY = [*PARAMETERS, (0.0, 1.0, 0, 0.0)]


@pytest.fixture
def kernel() -> triton_sampling.TritonSampling:
    return triton_sampling.TritonSampling()


@pytest.mark.parametrize("shape", SHAPES)
def test_by_the_book(kernel, shape):
    """Vocabularies of one tile, and one of two tiles with chunks of two logits; each shape tests a part of the
    parameters."""
    first = SHAPES.index(shape) % 3
    for number, parameters in enumerate(PARAMETERS[first::3]):
        check(kernel, shape, 1, (300, 1280, 17, 1, 5003)[number % 5], parameters)


@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", [97, 4500])
def test_tokens_equal_the_reference(kernel, vocab, shape):
    """Rows with several kinds of parameters at once; the same uniform numbers give the same tokens."""
    values = EVERY_WAY[(SHAPES.index(shape) + vocab) % 3 :: 3]
    logits, columns = draw_logits(shape, len(values), vocab, seed=vocab), given(len(values), vocab, *values)
    uniform = (torch.rand(len(values)) * 2**24).floor() * 2.0**-24
    assert kernel.sample(logits, columns, uniform).tolist() == TorchSampling().sample(logits, columns, uniform).tolist()


def test_a_nucleus_wider_than_the_candidates(kernel):
    """A flat distribution keeps more logits than a tile holds: the limit is searched in the row itself."""
    check(kernel, "flat", 1, 9001, (1.0, 0.7, 0, 0.0))
    check(kernel, "random", 1, 9001, (5.0, 0.9, 6000, 0.0))


@pytest.mark.parametrize("uniform", [0.0, HIGHEST])
def test_the_ends_of_the_uniform_range(kernel, uniform):
    logits = draw_logits("random", 3, 300, seed=5)
    columns = given(3, 300, (0.8, 1.0, 0, 0.0), (0.8, 0.9, 0, 0.0), (0.8, 1.0, 7, 0.0))
    drawn = kernel.sample(logits, columns, torch.full((3,), uniform))
    kept = kernel.probabilities(logits, columns, torch.arange(300).expand(3, 300)) > 0
    end = kept.int().argmax(-1) if uniform == 0 else 299 - kept.flip(-1).int().argmax(-1)
    assert drawn.tolist() == end.tolist()


@pytest.mark.parametrize("vocab", [1, 40, 4700])
def test_greedy_takes_the_lowest_of_equal_tokens(kernel, vocab):
    logits = torch.randn(4, vocab)
    logits[:, vocab // 2 :: 3] = 9.0
    assert kernel.greedy(logits).tolist() == [vocab // 2] * 4
    strided = logits.T.contiguous().T
    before = strided.clone()
    assert kernel.greedy(strided).tolist() == [vocab // 2] * 4
    assert torch.equal(strided, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 4099])
def test_broken_rows_fail_alone(kernel, bad, place):
    logits = draw_logits("random", 3, 4100, seed=1)
    logits[1, place] = bad
    columns = given(3, 4100, (0.8, 0.9, 0, 0.0))
    uniform = torch.tensor([0.25, 0.5, 0.75])
    fine = torch.tensor([0, 2])
    tokens = kernel.sample(logits, columns, uniform)
    assert tokens[1] == INVALID_TOKEN
    assert kernel.greedy(logits)[1] == INVALID_TOKEN
    assert (kernel.probabilities(logits, columns, torch.tensor([[0, 4099]] * 3))[1] == 0).all()
    want = TorchSampling().sample(logits[fine], given(2, 4100, (0.8, 0.9, 0, 0.0)), uniform[fine])
    assert tokens[fine].tolist() == want.tolist()


def test_nothing_left_to_choose(kernel):
    logits = torch.full((2, 30), -torch.inf)
    logits[1, 11] = -4.0
    assert kernel.sample(logits, given(2, 30, (1.0, 0.9, 5, 0.1)), torch.zeros(2)).tolist() == [INVALID_TOKEN, 11]
    assert kernel.greedy(logits).tolist() == [INVALID_TOKEN, 11]


def test_probabilities_of_drafts(kernel):
    """As in speculation: some tokens of a row, negative ids for none; a greedy row has probabilities 0 and 1."""
    logits = draw_logits("peaked", 3, 500, seed=2)
    columns = given(3, 500, (0.7, 0.95, 0, 0.0), (0.0, 1.0, 0, 0.0), (1.0, 1.0, 20, 0.1))
    best = logits.argmax(-1)
    tokens = torch.stack((best, torch.full((3,), -1), (best + 1) % 500), -1)
    got, want = (k.probabilities(logits, columns, tokens) for k in (kernel, TorchSampling()))
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-7)
    assert got[1].tolist() == [1.0, 0.0, 0.0]


def test_negative_and_positive_zero_are_one_logit(kernel):
    logits = torch.full((1, 64), -5.0)
    logits[0, 10], logits[0, 40] = -0.0, 0.0
    columns = given(1, 64, (1.0, 1.0, 2, 0.0))
    assert kernel.probabilities(logits, columns, torch.tensor([[10, 40, 3]])).tolist() == [[0.5, 0.5, 0.0]]


def test_no_rows(kernel):
    assert kernel.greedy(torch.empty(0, 50)).shape == (0,)


def share_rows(monkeypatch):
    """Tiles of 128 logits, and a GPU with 32 multiprocessors."""
    for module in (triton_greedy, triton_sampling):
        monkeypatch.setattr(module, "resident_programs", lambda device: 32)
        monkeypatch.setattr(module, "BLOCK", 128)


@pytest.mark.parametrize("trial", range(6))
def test_programs_share_a_row_with_limits(monkeypatch, kernel, trial):
    """Parts with few or no candidates, with more than a tile, ties across parts, and rows that are invalid."""
    share_rows(monkeypatch)
    for shape in random.sample(SHAPES, 3):
        values = random.sample(EVERY_WAY, 4)  # 16 programs a row: some have one tile, some several
        rows, vocab = len(values), random.choice((128, 1000, 2300, random.randint(129, 3500)))
        logits, columns = draw_logits(shape, rows, vocab, seed=random.randrange(2**31)), given(rows, vocab, *values)
        if trial % 2:
            logits = logits.round(decimals=1)  # many equal ones
        logits[1, random.randrange(vocab)] = random.choice((float("nan"), float("inf")))
        uniform = (torch.rand(rows) * 2**24).floor() * 2.0**-24
        reference = TorchSampling()
        assert kernel.sample(logits, columns, uniform).tolist() == reference.sample(logits, columns, uniform).tolist()
        half = logits.bfloat16()  # many equal ones
        assert (
            kernel.sample(half, columns, uniform).tolist() == reference.sample(half.float(), columns, uniform).tolist()
        )
        asked = torch.randint(0, vocab, (rows, 5))
        got, want = (each.probabilities(logits, columns, asked) for each in (kernel, reference))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("uniform", [0.0, 0.5, HIGHEST])
def test_the_drawn_token_is_in_any_part(monkeypatch, kernel, uniform):
    """Weight in the first, a middle or the last part alone: other parts are empty."""
    share_rows(monkeypatch)
    logits = torch.full((3, 1000), -torch.inf)
    places = ([0, 5, 9], [400, 420, 500], [997, 998, 999])
    for row, place in enumerate(places):
        logits[row, place] = 1.0
    drawn = kernel.sample(logits, given(3, 1000, (1.0, 1.0, 0, 0.0)), torch.full((3,), uniform))
    assert drawn.tolist() == [place[int(uniform * 3)] for place in places]


@pytest.mark.parametrize("trial", range(3))
def test_programs_share_a_row(monkeypatch, trial):
    """Equal tokens, NaN and infinities in any part; the arrivals are counted from 0 again in each launch."""
    share_rows(monkeypatch)
    kernel = triton_sampling.TritonSampling()
    for _ in range(3):
        rows, vocab = random.randint(2, 6), random.choice((100, 1000, 4000, random.randint(129, 9000)))
        programs = row_programs.programs_of_row(rows, vocab, 128, 32)
        assert programs == (1 if vocab == 100 else min(-(-vocab // 128), 64 // rows))
        logits = torch.randn(rows, vocab).round(decimals=1)  # many equal ones
        best = logits.argmax(-1)
        expected = [int((logits[row] == logits[row, best[row]]).nonzero()[0]) for row in range(rows)]
        bad = random.choice((float("nan"), float("inf")))
        logits[1, random.randrange(vocab)] = bad
        logits[0, : expected[0]] = -torch.inf
        expected[1] = INVALID_TOKEN
        assert kernel.greedy(logits).tolist() == expected
        half = torch.randn(rows, vocab).bfloat16()
        assert kernel.greedy(half).tolist() == TorchSampling().greedy(half.float()).tolist()


def test_many_rows_have_a_program_each():
    def programs(count, vocab):
        return row_programs.programs_of_row(count, vocab, triton_greedy.BLOCK, 132)

    assert programs(129, 129280) == 1 and programs(128, 129280) == 2
    assert programs(1, 129280) == 32 and programs(1, 40) == 1
