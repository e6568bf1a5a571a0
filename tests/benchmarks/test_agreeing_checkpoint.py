"""Checkpoints whose MTP drafts agree at a chosen rate, and the measurement of that rate."""

import json

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.agreeing_checkpoint import ensure_agreeing_checkpoint
from benchmarks.checkpoints import SPECIAL_TOKENS, ensure_checkpoint
from benchmarks.mtp_agreement import measure

SEQUENCES, NUM_TOKENS, CHAIN = 16, 40, 3


def tensors(path):
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    def make(agreement, seed=0, **overrides):
        folder = tmp_path_factory.mktemp("agreeing") / "checkpoint"
        return ensure_agreeing_checkpoint(agreement, "moe-tiny", folder, seed, num_hidden_layers=2, **overrides)

    return make


@pytest.mark.parametrize("agreement", [1.0, 0.7, 0.0])
def test_drafts_agree_at_the_chosen_rate_at_every_position(make, agreement):
    path = make(agreement, seed=int(agreement * 10))
    found = measure(path, CHAIN, SEQUENCES, num_tokens=NUM_TOKENS, seed=1)
    assert found.drafts == SEQUENCES * (NUM_TOKENS + 1 - CHAIN)
    reached = float(found.drafts)
    for rate in found.rates:
        error = (agreement * (1 - agreement) / max(reached, 1)) ** 0.5
        assert rate == pytest.approx(agreement, abs=5 * error)
        reached *= rate


def test_drafts_of_ordinary_random_weights_do_not_agree(tmp_path):
    path = ensure_checkpoint("moe-tiny", tmp_path / "m", num_hidden_layers=2, num_nextn_predict_layers=1)
    found = measure(path, CHAIN, SEQUENCES, num_tokens=NUM_TOKENS)
    assert found.rates[0] < 0.05 and found.tokens_per_step < 1.05


def test_greedy_decoding_walks_one_cycle_and_spoiled_tokens_come_second(make):
    found = tensors(make(0.6, seed=3, hidden_size=512))
    embedding, head = found["model.embed_tokens.weight"].float(), found["lm_head.weight"].float()
    special, vocab_size = len(SPECIAL_TOKENS), len(embedding)
    following = (embedding @ head.T).argmax(dim=1).tolist()
    token, seen = special, set()
    while token not in seen:
        seen.add(token)
        token = following[token]
    assert seen == set(range(special, vocab_size))
    eh_proj = found["model.layers.2.eh_proj.weight"].float()
    best = (embedding @ eh_proj[:, : embedding.shape[1]].T @ head.T)[special:].topk(2).indices
    hits = best == torch.tensor(following[special:]).unsqueeze(1)
    assert hits[:, 0].float().mean() == pytest.approx(0.6, abs=0.02)
    assert hits.any(dim=1).float().mean() > 0.98


def test_weights_are_dense_and_the_copies_are_copies(make):
    found = tensors(make(0.8))
    for name, tensor in found.items():
        assert tensor.abs().min() >= torch.finfo(torch.bfloat16).tiny or (tensor == 0).float().mean() < 1e-3, name
        assert tensor.float().std() > 0, name
    assert torch.equal(found["model.layers.2.embed_tokens.weight"], found["model.embed_tokens.weight"])
    assert torch.equal(found["model.layers.2.shared_head.head.weight"], found["lm_head.weight"])


def test_same_seed_same_bytes(make):
    first, again, other = tensors(make(0.8, seed=4)), tensors(make(0.8, seed=4)), tensors(make(0.8, seed=5))
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_refusals(make, tmp_path):
    with pytest.raises(ValueError, match=r"agreement 1\.5"):
        make(1.5)
    with pytest.raises(ValueError, match="dense-tiny has no MTP layers"):
        ensure_agreeing_checkpoint(0.5, "dense-tiny", tmp_path)
    path = make(0.5)
    assert json.loads((path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with pytest.raises(ValueError, match="another checkpoint"):
        ensure_agreeing_checkpoint(0.6, "moe-tiny", path, num_hidden_layers=2)
