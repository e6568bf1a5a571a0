"""The MTP layer of DeepSeek V4 against `MTPOracle`: whole, in chunks, token by token, in draft chains."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_engine.models import sizes
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.models.loader import LoadOptions, reload
from tests.models.rows import all_rows
from tests.models.sparse import clear_draw
from tests.models.test_mtp import Drafter
from tests.models.test_parity import assert_close
from tests.models.v4_checkpoints import make_v4
from tests.models.v4_mtp import MTPOracle

LENGTH = 60  # the window of 16 ends, and entries are selected
every_row = pytest.mark.parametrize("row", all_rows())


class Oracle(MTPOracle):
    """Over a random checkpoint, with a random sequence of clear selections in all layers."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.path = make_v4(folder / "own", seed, num_mtp_layers=1, tokenizer=False)
        super().__init__(self.path, folder / "alone")
        self.tokens, self.states = clear_draw(self._sequence)

    def _sequence(self) -> tuple[list[int], Tensor]:
        tokens = [random.randrange(250) for _ in range(LENGTH + 1)]
        states = self.streams(tokens[:-1])
        self.draft(tokens[1:], states)
        return tokens, states

    def random_chain(self, start: int) -> tuple[list[int], list[tuple[Tensor, Tensor]]]:
        """Random drafts after `start` tokens, and the layer's outputs of each: v [1, n D] and its logits [1, V]."""
        hidden, next_ids, outputs = self.states[:start], self.tokens[1 : start + 1], []
        v = self.draft(next_ids, hidden)[0]
        drafts = [random.randrange(250) for _ in range(4)]
        for draft in drafts:
            hidden, next_ids = torch.cat((hidden, v[-1:])), [*next_ids, draft]
            v, logits = self.draft(next_ids, hidden)
            outputs.append((v[-1:], logits[-1:]))
        return drafts, outputs


class StreamsDrafter(Drafter):
    """Hidden states are the residual's streams after the model's last layer."""

    def __init__(self, path: Path, row: str, seed: int = 0) -> None:
        super().__init__(path, row, page_size=16, seed=seed)
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
    check(drafter, drafter.step(oracle.tokens, 0, LENGTH), oracle.draft(oracle.tokens[1:], oracle.states))


@every_row
def test_chunks_then_decode(oracle: Oracle, row: str) -> None:
    tokens, drafter, got = oracle.tokens, StreamsDrafter(oracle.path, row, seed=1), []
    for start, stop, decode in ((0, 21, False), (21, 40, False), *((i, i + 1, True) for i in range(40, 50))):
        got.append(drafter.step(tokens, start, stop, decode))
        drafter.step(tokens[::-1], stop, stop + 2, sequence=1)
    got += [drafter.step(tokens, 50, 55, True), drafter.step(tokens, 55, LENGTH)]
    check(drafter, torch.cat(got), oracle.draft(tokens[1:], oracle.states))


@every_row
def test_drafting_further_and_back(oracle: Oracle, row: str) -> None:
    """v is the next hidden state; the model later overwrites the KV that drafting wrote after the sequence."""
    tokens, drafter = oracle.tokens, StreamsDrafter(oracle.path, row, seed=2)
    got = [drafter.step(tokens, 0, 45)]
    for start, stop in ((45, 46), (46, 49), (49, LENGTH)):
        v = got[-1][-1:]
        for draft, want in zip(*clear_draw(lambda start=start: oracle.random_chain(start)), strict=True):  # type: ignore[misc]
            v = drafter.draft(drafter.batch([draft], decode=True), [draft], v)
            check(drafter, v, want)
        drafter.main.lengths[0] = start
        got.append(drafter.step(tokens, start, stop, decode=True))
    check(drafter, torch.cat(got), oracle.draft(tokens[1:], oracle.states))


@every_row
def test_keys_alone(oracle: Oracle, row: str) -> None:
    """`remember` writes what a whole step writes."""
    tokens, drafter = oracle.tokens, StreamsDrafter(oracle.path, row)
    batch = drafter.batch(tokens[:50])
    drafter._taps.during(drafter.main.model.forward, batch)
    states = drafter.mtp.prepare(drafter._taps.take())
    drafter.mtp.remember(0, torch.tensor(tokens[1:51]), states, batch)
    got = drafter.step(tokens, 50, LENGTH)
    check(drafter, got, tuple(found[50:] for found in oracle.draft(tokens[1:], oracle.states)))  # type: ignore[arg-type]


def test_weight_bytes_is_what_is_held_beyond_the_model(oracle: Oracle) -> None:
    drafter = StreamsDrafter(oracle.path, "torch")
    wanted = sizes.weight_bytes(drafter.config, 4, include_mtp=True) - sizes.weight_bytes(drafter.config, 4)
    assert drafter.mtp.weight_bytes == pytest.approx(wanted, rel=1e-3)  # factors of the streams, once a number


def test_modules_with_other_weights(oracle: Oracle, tmp_path: Path) -> None:
    """Each module reads all its tensors again."""
    other = make_v4(tmp_path, random.randrange(1 << 30), num_mtp_layers=1, tokenizer=False)
    drafter = StreamsDrafter(oracle.path, "torch")
    for part in (drafter.main.model, drafter.mtp):
        for old, new in reload(part, other, drafter.config, LoadOptions("float32")):  # type: ignore[arg-type]
            assert type(old) is type(new)
            vars(old).update(vars(new))
    fresh = StreamsDrafter(other, "torch")
    batch, ids = fresh.batch(oracle.tokens[:-1]), oracle.tokens[1:]
    v = fresh.draft(batch, ids, oracle.states)
    assert torch.equal(drafter.draft(batch, ids, oracle.states), v)
    assert torch.equal(drafter.mtp._layers[0].output(v), fresh.mtp._layers[0].output(v))  # type: ignore[union-attr]
