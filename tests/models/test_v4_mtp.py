"""The MTP layer of DeepSeek V4, which transformers does not have, against transformers' decoder layer and the formula
of DeepSeek's release: whole, in chunks, token by token, in draft chains."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.models.layers.hidden_taps import HiddenTaps
from tests.models.rows import all_rows
from tests.models.test_mtp import Drafter
from tests.models.test_parity import assert_close
from tests.models.v4_checkpoints import FIELDS, SLIDING, load_v4, make_v4, write_tensors

LENGTH = 60  # the window of 16 ends, and entries are selected
every_row = pytest.mark.parametrize("row", all_rows())


class Oracle:
    """transformers' model, and a model of one layer that has the MTP layer's weights, over a random checkpoint."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.path = make_v4(folder / "own", seed, num_mtp_layers=1, tokenizer=False)
        tensors = load_file(self.path / "model.safetensors")
        mtp = {name.removeprefix("mtp.0."): tensor for name, tensor in tensors.items() if name.startswith("mtp.0.")}
        self._inputs = {name: mtp.pop(f"{name}.weight") for name in ("e_proj", "h_proj", "enorm", "hnorm")}
        outside = ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale")
        layer = {name if name in outside else f"layers.0.{name}": tensor for name, tensor in mtp.items()}
        one = {"num_hidden_layers": 1, "layer_types": [SLIDING], "num_hash_layers": 0}
        alone = make_v4(folder / "alone", tokenizer=False, **one)
        write_tensors(alone, layer | {name: tensors[name].clone() for name in ("embed.weight", "head.weight")})
        self._model, self._mtp = load_v4(self.path), load_v4(alone)
        self.tokens = [random.randrange(250) for _ in range(LENGTH + 1)]
        self.streams = self._run(self._model, self.tokens[:-1])[0]

    @torch.no_grad()
    def draft(self, next_ids: list[int], streams: Tensor) -> tuple[Tensor, Tensor]:
        """v [T, n D] of a sequence from its start, and its logits [T, V]. streams: [T, n D]."""
        weights, width = self._inputs, FIELDS["hidden_size"]
        embedding = self._model.model.embed_tokens(torch.tensor(next_ids))
        z = (norm(embedding) * weights["enorm"]) @ weights["e_proj"].T
        hidden = (norm(streams.view(-1, FIELDS["hc_mult"], width)) * weights["hnorm"]) @ weights["h_proj"].T
        return self._run(self._mtp, next_ids, z.unsqueeze(1) + hidden)

    def _run(self, model: Any, ids: list[int], streams: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The streams after the last layer, and logits. streams: input of the first layer; None: the model's own."""
        seen: list[Tensor] = []
        hooks = [model.model.hc_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))]
        if streams is not None:
            change = model.model.layers[0].register_forward_pre_hook(lambda _, args: (streams.unsqueeze(0), *args[1:]))
            hooks.append(change)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        for hook in hooks:
            hook.remove()
        return seen[0][0].flatten(1), logits


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + FIELDS["rms_norm_eps"])


class StreamsDrafter(Drafter):
    """Hidden states are the residual's streams after the model's last layer."""

    def __init__(self, path: Path, row: str, seed: int = 0) -> None:
        super().__init__(path, row, page_size=8, seed=seed)
        self._taps = self.main.model.taps = HiddenTaps((self.config.num_layers,))  # type: ignore[attr-defined]

    def step(self, tokens: list[int], start: int, stop: int, decode: bool = False, sequence: int = 0) -> Tensor:
        batch = self.batch(tokens[start:stop], decode, sequence)
        self._taps.during(self.main.model.forward, batch)
        return self.draft(batch, tokens[start + 1 : stop + 1], self.mtp.prepare(self._taps.take()))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("v4_mtp"), random.randrange(1 << 30))


def check(drafter: Drafter, got: Tensor, want: tuple[Tensor, Tensor]) -> None:
    assert_close(got, want[0])
    assert_close(drafter.mtp.logits(got), want[1])


@every_row
def test_whole_prompt(oracle: Oracle, row: str) -> None:
    drafter = StreamsDrafter(oracle.path, row)
    check(drafter, drafter.step(oracle.tokens, 0, LENGTH), oracle.draft(oracle.tokens[1:], oracle.streams))


@every_row
def test_chunks_then_decode(oracle: Oracle, row: str) -> None:
    tokens, drafter, got = oracle.tokens, StreamsDrafter(oracle.path, row, seed=1), []
    for start, stop, decode in ((0, 21, False), (21, 40, False), *((i, i + 1, True) for i in range(40, 50))):
        got.append(drafter.step(tokens, start, stop, decode))
        drafter.step(tokens[::-1], stop, stop + 2, sequence=1)
    got += [drafter.step(tokens, 50, 55, True), drafter.step(tokens, 55, LENGTH)]
    check(drafter, torch.cat(got), oracle.draft(tokens[1:], oracle.streams))


@every_row
def test_drafting_further_and_back(oracle: Oracle, row: str) -> None:
    """v is the next hidden state; the model later overwrites the KV that drafting wrote after the sequence."""
    tokens, drafter = oracle.tokens, StreamsDrafter(oracle.path, row, seed=2)
    got = [drafter.step(tokens, 0, 45)]
    for start, stop in ((45, 46), (46, 49), (49, LENGTH)):
        drafts = [random.randrange(250) for _ in range(4)]
        hidden, next_ids, v = oracle.streams[:start], tokens[1 : start + 1], got[-1][-1:]
        for draft in drafts:
            hidden = torch.cat((hidden, oracle.draft(next_ids, hidden)[0][-1:]))
            next_ids = [*next_ids, draft]
            v = drafter.draft(drafter.batch([draft], decode=True), [draft], v)
            check(drafter, v, tuple(found[-1:] for found in oracle.draft(next_ids, hidden)))  # type: ignore[arg-type]
        drafter.main.lengths[0] = start
        got.append(drafter.step(tokens, start, stop, decode=True))
    check(drafter, torch.cat(got), oracle.draft(tokens[1:], oracle.streams))


@every_row
def test_keys_alone(oracle: Oracle, row: str) -> None:
    """`remember` writes what a whole step writes."""
    tokens, drafter = oracle.tokens, StreamsDrafter(oracle.path, row)
    batch = drafter.batch(tokens[:50])
    drafter._taps.during(drafter.main.model.forward, batch)
    states = drafter.mtp.prepare(drafter._taps.take())
    drafter.mtp.remember(0, torch.tensor(tokens[1:51]), states, batch)
    got = drafter.step(tokens, 50, LENGTH)
    check(drafter, got, tuple(found[50:] for found in oracle.draft(tokens[1:], oracle.streams)))  # type: ignore[arg-type]

