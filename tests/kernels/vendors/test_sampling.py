"""FlashInfer's sampling row must give the tokens of the torch row."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.sampling import flashinfer as flashinfer_module
from moe_engine.kernels.sampling.flashinfer import FlashInferSampling
from moe_engine.kernels.sampling.protocol import INVALID_TOKEN
from moe_engine.kernels.sampling.reference import TorchSampling
from tests.kernels.cpu.formulas import NAN
from tests.kernels.cpu.test_sampling import given
from tests.kernels.vendors import flashinfer_emulator
from tests.kernels.vendors.contract import ContractBroken

CHOICES = [  # temperature, top_p, top_k (0: all), min_p
    (0.0, 1.0, 0, 0.0), (1.0, 1.0, 0, 0.0), (0.7, 1.0, 0, 0.1), (1.3, 1.0, 1, 0.0), (0.9, 1.0, 20, 0.0),
    (0.9, 0.6, 20, 0.0), (1.0, 0.8, 500, 0.02), (0.8, 0.9, 0, 0.0), (1.0, 0.05, 0, 0.0), (1.0, 0.7, 3000, 0.0),
]  # fmt: skip


def uniform(count: int) -> torch.Tensor:
    return torch.randint(0, 1 << 24, (count,)).float() / (1 << 24)


@pytest.mark.parametrize("at_once", [1 << 22, 7 * 97])
@pytest.mark.parametrize("vocab", [97, 4001])
@pytest.mark.parametrize("ties", [False, True])
def test_tokens_and_probabilities_are_the_torch_rows(monkeypatch, vocab, ties, at_once):
    monkeypatch.setattr(flashinfer_module, "MAX_ELEMENTS", at_once)
    ours, reference = FlashInferSampling(flashinfer_emulator.module()), TorchSampling()
    choices = [choice for choice in CHOICES if choice[2] <= vocab] * 6
    rows = given(len(choices), vocab, *choices)
    logits = torch.randn(len(choices), vocab) * 3
    if ties:  # dozens of equal logits at every limit
        logits = logits.round()
    logits[:, 5] = -torch.inf
    kept = logits.clone()
    u = uniform(len(choices))
    got, want = ours.sample(logits, rows, u), reference.sample(logits, rows, u)
    assert torch.equal(logits, kept)
    # a cumulative share near top_p may keep one token more or less by rounding
    assert (got == want).float().mean() >= 0.97, (got, want)
    asked = torch.cat((want[:, None], torch.randint(-1, vocab, (len(choices), 5))), 1)
    close = (ours.probabilities(logits, rows, asked) - reference.probabilities(logits, rows, asked)).abs() < 1e-4
    assert close.float().mean() >= 0.97


def test_the_numbers_drawn_have_their_probabilities():
    kernel, vocab, count = FlashInferSampling(flashinfer_emulator.module()), 12, 4000
    logits = torch.randn(1, vocab).expand(count, vocab).contiguous()
    rows = given(count, vocab, (0.8, 0.9, 6, 0.0))
    tokens = kernel.sample(logits, rows, (torch.arange(count).float() + 0.5) / count)
    share = torch.bincount(tokens, minlength=vocab).float() / count
    asked = torch.arange(vocab).expand(1, vocab)
    want = kernel.probabilities(logits[:1], given(1, vocab, (0.8, 0.9, 6, 0.0)), asked)[0]
    assert (share - want).abs().max() < 2e-3 and (want > 0).sum() <= 6


def test_broken_rows_leave_the_others_alone():
    kernel, vocab = FlashInferSampling(flashinfer_emulator.module()), 50
    rows = given(6, vocab, *[(1.0, 0.9, 0, 0.0)] * 5, (0.0, 1.0, 0, 0.0))
    logits, u = torch.randn(6, vocab), uniform(6)
    whole = kernel.sample(logits, rows, u)
    logits[1, 3], logits[2, 4], logits[3] = NAN, torch.inf, -torch.inf
    got = kernel.sample(logits, rows, u)
    assert got[[1, 2, 3]].tolist() == [INVALID_TOKEN] * 3
    assert torch.equal(got[[0, 4, 5]], whole[[0, 4, 5]])
    asked = torch.zeros(6, 1, dtype=torch.int64)
    assert kernel.probabilities(logits, rows, asked)[[1, 2, 3]].eq(0).all()
    assert torch.equal(kernel.greedy(logits), TorchSampling().greedy(logits))


def test_a_row_does_not_depend_on_the_others():
    kernel, vocab = FlashInferSampling(flashinfer_emulator.module()), 300
    logits, u = torch.randn(len(CHOICES), vocab), uniform(len(CHOICES))
    together = kernel.sample(logits, given(len(CHOICES), vocab, *CHOICES), u)
    alone = [kernel.sample(logits[i : i + 1], given(1, vocab, c), u[i : i + 1]) for i, c in enumerate(CHOICES)]
    assert torch.equal(together, torch.cat(alone))


def test_the_emulator_refuses_wrong_calls():
    lib = flashinfer_emulator.module().sampling
    probs = torch.rand(3, 9).softmax(-1)
    good_k, good_p = torch.tensor([1, 5, 9]).int(), torch.tensor([0.5, 0.9, 1.0])
    lib.top_k_renorm_probs(probs, good_k), lib.top_p_renorm_probs(probs, good_p)
    for call in (
        lambda: lib.softmax(probs, torch.tensor([0.0, 1.0, 1.0])),
        lambda: lib.softmax(probs.double(), torch.ones(3)),
        lambda: lib.softmax(probs / 0 * 0, torch.ones(3)),
        lambda: lib.top_k_renorm_probs(probs, good_k.long()),
        lambda: lib.top_k_renorm_probs(probs, good_k + 5),
        lambda: lib.top_k_renorm_probs(probs * 2, good_k),
        lambda: lib.top_p_renorm_probs(probs, good_p.double()),
        lambda: lib.top_p_renorm_probs(probs, good_p - 0.5),
    ):
        with pytest.raises(ContractBroken):
            call()
