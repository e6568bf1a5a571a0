"""Every sampling row against a float64 sort: the kept tokens, their probabilities, and the token of a random number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_engine.kernels import tables
from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.device import Need, cpu_device
from moe_engine.kernels.registry import Choice
from moe_engine.kernels.sampling import reference as reference_module
from moe_engine.kernels.sampling.cpu import CpuSampling
from moe_engine.kernels.sampling.protocol import INVALID_TOKEN, Draw, SamplingKernel, SamplingParameters
from moe_engine.kernels.sampling.reference import TorchSampling, first_argmax
from tests.kernels.cpu.conftest import threads
from tests.models.rows import cpu_rows_of

SHAPES = ("random", "peaked", "flat", "tied", "all equal", "masked")
HIGHEST = 1 - 2.0**-24
EDGE = 1e-6  # of the probability: a sum in float32 may put a token on the other side of top_p, or of the uniform number

PARAMETERS = [
    # temperature, top_p, top_k, min_p
    (0.8, 1.0, 0, 0.0),
    (1.0, 0.95, 0, 0.0),
    (2.0, 0.3, 0, 0.0),
    (0.9, 0.99999, 0, 0.0),
    (1.0, 1e-9, 0, 0.0),
    (0.7, 1.0, 50, 0.0),
    (1.3, 1.0, 3000, 0.0),
    (0.8, 0.9, 40, 0.02),
    (2.0, 0.9, 2000, 0.0),
    (1.0, 0.9, 0, 0.05),
    (1.0, 1.0, 0, 1.0),
    (1e-6, 0.99, 40, 0.0),
    (0.01, 0.9, 20, 0.0),
    (100.0, 0.9, 0, 0.0),
]


@pytest.fixture(params=cpu_rows_of(tables.SAMPLING), ids=lambda row: row.name)
def kernel(request: pytest.FixtureRequest) -> SamplingKernel:
    """Every row of the family that can run here."""
    why_not = request.param.why_not(cpu_device(), Need("float32"))
    if why_not:
        pytest.skip(why_not)
    return Choice("sampling", request.param, "tested").build()


def draw_logits(shape: str, rows: int, vocab: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator)
    if shape == "peaked":
        best = torch.randint(vocab, (rows, 12), generator=generator)
        logits.scatter_add_(1, best, 15 * torch.rand(rows, 12, generator=generator))
    elif shape == "flat":
        logits *= 1e-3
    elif shape == "tied":
        logits = (4 * logits).round() / 4
    elif shape == "all equal":
        logits.fill_(-3.5)
    elif shape == "masked":
        logits.masked_fill_(torch.rand(rows, vocab, generator=generator) < 0.9, -torch.inf)
        logits[:, vocab // 2] = 0.25
    return logits


def given(
    rows: int, vocab: int, *values: tuple[float, float, int, float], asynchronous: bool = False
) -> SamplingParameters:
    """`values`, repeated over the rows."""
    chosen = [values[row % len(values)] for row in range(rows)]
    temperature, top_p, top_k, min_p = zip(*chosen)
    limits = [k if 0 < k < vocab else vocab for k in top_k]
    draws = [Draw.of(t == 0, k, p, vocab) for t, k, p in zip(temperature, limits, top_p)]
    return SamplingParameters(
        np.array(draws, dtype=np.uint8),
        torch.tensor(temperature),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.tensor(limits),
        asynchronous,
    )


class Sorted:
    """A row's tokens best first, lower ids first among equals, with float64 weights and the counts that may be kept."""

    def __init__(self, logits: np.ndarray, parameters: tuple[float, float, int, float]) -> None:
        temperature, top_p, min_p = (float(np.float32(parameters[i])) for i in (0, 1, 3))
        top_k = parameters[2] or len(logits)
        wide = logits.astype(np.float64)
        self.order = np.argsort(-wide, kind="stable")
        self.weights = np.exp((wide[self.order] - wide.max()) / temperature)
        within = self.weights[:top_k]
        before = np.cumsum(within) - within
        reach = top_p * within.sum()
        visible = within > 1e-37

        def count(edge: float) -> int:
            kept = (before < reach * (1 + edge)) & (within >= min_p * (1 - edge)) & visible
            return max(1, int(kept.sum()))

        self.fewest, self.most = count(-EDGE), count(EDGE)

    def probabilities(self, count: int) -> np.ndarray:
        found = np.zeros(len(self.order))
        found[self.order[:count]] = self.weights[:count] / self.weights[:count].sum()
        return found


def check(
    kernel: SamplingKernel, shape: str, rows: int, vocab: int, parameters: tuple, asynchronous: bool = False
) -> None:
    logits = draw_logits(shape, rows, vocab, seed=vocab)
    columns = given(rows, vocab, parameters, asynchronous=asynchronous)
    every = torch.arange(vocab).expand(rows, vocab)
    found = kernel.probabilities(logits, columns, every).double().numpy()
    generator = torch.Generator().manual_seed(vocab + 1)
    uniform = (torch.rand(rows, generator=generator) * 2**24).floor() * 2.0**-24
    tokens = kernel.sample(logits, columns, uniform).tolist()
    for row in range(rows):
        by_the_book = Sorted(logits[row].numpy(), parameters)
        count = int((found[row] > 0).sum())
        assert by_the_book.fewest <= count <= by_the_book.most
        expected = by_the_book.probabilities(count)
        assert ((found[row] > 0) == (expected > 0)).all()
        assert np.abs(found[row] - expected).max() < 2e-5 * expected.max()
        cdf, token, u = np.cumsum(expected), tokens[row], float(uniform[row])
        assert expected[token] > 0
        assert cdf[token] - expected[token] - 5 * EDGE <= u <= cdf[token] + 5 * EDGE


@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", [1, 17, 300, 1280, 5003])
def test_by_the_book(kernel: SamplingKernel, vocab: int, shape: str) -> None:
    for parameters in PARAMETERS:
        check(kernel, shape, 3, vocab, parameters)


@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", [32_000, 129_280])
def test_by_the_book_in_large_vocabularies(library: Library, vocab: int, shape: str) -> None:
    for parameters in PARAMETERS:
        check(CpuSampling(library), shape, 1, vocab, parameters)


@pytest.mark.parametrize("parameters", [PARAMETERS[1], PARAMETERS[5], PARAMETERS[8]], ids=str)
def test_the_torch_row_in_a_large_vocabulary(parameters: tuple) -> None:
    check(TorchSampling(), "random", 2, 32_000, parameters)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_reading_flags(shape: str) -> None:
    """As the torch row works on a device that runs asynchronously."""
    for parameters in PARAMETERS:
        check(TorchSampling(), shape, 3, 2100, parameters, asynchronous=True)


def test_other_machines(any_library: Library) -> None:
    for shape in SHAPES:
        for parameters in PARAMETERS[::2]:
            check(CpuSampling(any_library), shape, 2, 1300, parameters)
    logits = draw_logits("tied", 20, 1300, 0)
    assert CpuSampling(any_library).greedy(logits).tolist() == logits.numpy().argmax(-1).tolist()


def test_a_row_depends_on_itself_alone(kernel: SamplingKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vocab = 40, 2500
    values = [*PARAMETERS, (0.0, 1.0, 0, 0.0)]
    logits = torch.cat([draw_logits(shape, rows // 4, vocab, 3) for shape in ("random", "peaked", "tied", "masked")])
    uniform, asked = torch.rand(rows), torch.randint(-1, vocab, (rows, 5))
    columns = given(rows, vocab, *values)
    tokens, found = kernel.sample(logits, columns, uniform), kernel.probabilities(logits, columns, asked)
    assert (found[asked < 0] == 0).all()
    monkeypatch.setattr(reference_module, "CACHED_ELEMENTS", 7000)
    with threads(2):
        assert torch.equal(kernel.sample(logits, columns, uniform), tokens)
        assert torch.equal(kernel.probabilities(logits, columns, asked), found)
    for row in range(rows):
        one, here = given(1, vocab, values[row % len(values)]), slice(row, row + 1)
        assert torch.equal(kernel.sample(logits[here], one, uniform[here]), tokens[here])
        assert torch.equal(kernel.probabilities(logits[here], one, asked[here]), found[here])


def test_strided_logits_are_not_changed(kernel: SamplingKernel) -> None:
    whole = draw_logits("random", 6, 1400, 5)
    before, part = whole.clone(), whole[::2, 50:1350]
    columns, uniform, asked = given(3, 1300, *PARAMETERS[5:8]), torch.rand(3), torch.randint(1300, (3, 4))
    same = part.contiguous()
    assert torch.equal(kernel.greedy(part), kernel.greedy(same))
    assert torch.equal(kernel.sample(part, columns, uniform), kernel.sample(same, columns, uniform))
    assert torch.equal(kernel.probabilities(part, columns, asked), kernel.probabilities(same, columns, asked))
    assert torch.equal(whole, before)


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_the_ends_of_the_uniform_range(kernel: SamplingKernel, parameters: tuple) -> None:
    logits = draw_logits("tied", 4, 1301, 9)
    columns = given(4, 1301, parameters)
    kept = kernel.probabilities(logits, columns, torch.arange(1301).expand(4, -1)) > 0
    for end, index in ((0.0, 0), (HIGHEST, -1)):
        tokens = kernel.sample(logits, columns, torch.full((4,), end))
        nearly = [row.nonzero()[index, 0].item() for row in kept]
        if index == 0:
            assert tokens.tolist() == nearly
        else:  # a last token below 2^-24 is skipped
            assert kept[torch.arange(4), tokens].all() and (tokens > 0.9 * torch.tensor(nearly) - 50).all()


@pytest.mark.parametrize("vocab", [5, 1023, 1500, 4097])
def test_greedy_takes_the_lowest_of_equal_tokens(kernel: SamplingKernel, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(0, 6, (50, vocab), generator=generator).float()  # many ties
    assert kernel.greedy(logits).tolist() == logits.numpy().argmax(-1).tolist()
    assert torch.equal(first_argmax(logits)[0], logits.amax(-1))


@pytest.mark.each_value
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 7, 2999])
def test_broken_rows_fail_alone(kernel: SamplingKernel, bad: float, place: int) -> None:
    values = [*PARAMETERS, (0.0, 1.0, 0, 0.0)]
    rows = 2 * len(values)
    logits, uniform = draw_logits("random", rows, 3000, 1), torch.rand(rows)
    columns, asked = given(rows, 3000, *values), torch.randint(3000, (rows, 8))
    best = kernel.greedy(logits)
    asked[:, 0] = best
    whole, found = kernel.sample(logits, columns, uniform), kernel.probabilities(logits, columns, asked)
    logits[::2, place] = bad
    tokens, after = kernel.sample(logits, columns, uniform), kernel.probabilities(logits, columns, asked)
    assert (tokens[::2] == INVALID_TOKEN).all() and (after[::2] == 0).all()
    assert torch.equal(tokens[1::2], whole[1::2]) and torch.equal(after[1::2], found[1::2])
    assert (kernel.greedy(logits)[::2] == INVALID_TOKEN).all()
    assert torch.equal(kernel.greedy(logits)[1::2], best[1::2])


def test_nothing_left_to_choose(kernel: SamplingKernel) -> None:
    values = [*PARAMETERS, (0.0, 1.0, 0, 0.0)]
    logits, columns = torch.full((len(values), 700), -torch.inf), given(len(values), 700, *values)
    assert (kernel.sample(logits, columns, torch.rand(len(values))) == INVALID_TOKEN).all()
    assert (kernel.probabilities(logits, columns, torch.zeros(len(values), 1, dtype=torch.int64)) == 0).all()
