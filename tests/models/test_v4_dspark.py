"""The DSpark layers of DeepSeek V4 against `DSparkOracle`: blocks after prompts, chunks and single tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.models import sizes
from moe_engine.models.drafts.stream_block import StreamBlock
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.models.loader import LoadOptions, load_mtp, reload
from tests.models import stepper
from tests.models.rows import all_rows
from tests.models.stepper import Chunk, make_kv
from tests.models.test_parity import assert_close
from tests.models.v4_dspark import DSPARK, STAGES, DSparkOracle, make_dspark

LENGTH, MASK = 70, DSPARK["dspark_noise_token_id"]
every_row = pytest.mark.parametrize("row", all_rows())


class Oracle(DSparkOracle):
    """Over a random checkpoint, with a random sequence."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.path = make_dspark(folder / "own", seed, tokenizer=False)
        super().__init__(self.path, folder / "alone")
        self.tokens = [random.randrange(250) for _ in range(LENGTH + 1)]
        self.means = self.states(self.tokens[:-1])


class Blocks:
    """A model and its DSpark layers over one KV pool."""

    def __init__(self, path: Path, row: str, seed: int = 0) -> None:
        self.main = stepper.load(path, row, "float32", page_size=16, seed=seed)
        self.config = self.main.config
        found: Any = load_mtp(path, self.config, self.main.model, LoadOptions("float32"))
        self.layers: StreamBlock = found
        self.main.kv += make_kv(self.config, self.main.num_slots, torch.float32, num_mtp_layers=STAGES)
        own, streams = self.config.own_block, self.config.streams
        assert own is not None and streams is not None
        taps = HiddenTaps(own.tapped, streams.count, self.config.hidden_size)
        self._taps = self.main.model.taps = taps  # type: ignore[attr-defined]

    def step(self, tokens: list[int], decode: bool = False, sequence: int = 0) -> None:
        batch = self.main.batch([Chunk(sequence, tokens, decode)])
        self._taps.during(self.main.model.forward, batch)
        self.layers.remember(self._taps.take(), batch)

    def block(self, root: int, count: int) -> Tensor:
        """Logits [count, V]; the sequence remains as it was."""
        length = self.main.lengths[0]
        v = self.layers.forward(self.main.batch([Chunk(0, [root] + [MASK] * (count - 1), True)]))
        self.main.lengths[0] = length
        return self.layers.logits(v)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("v4_dspark"), random.randrange(1 << 30))


@every_row
def test_blocks_behind_a_text_of_each_length(oracle: Oracle, row: str) -> None:
    """Within the window of 16, at its end, and beyond; blocks of all lengths."""
    tokens, blocks, place = oracle.tokens, Blocks(oracle.path, row), 0
    decodes = {15, 16, 17, LENGTH}
    for step, stop in enumerate((1, 9, 15, 16, 17, 50, LENGTH)):
        blocks.step(tokens[place:stop], stop in decodes)
        blocks.step(tokens[: stop - place], sequence=1)
        count = 1 + step % DSPARK["dspark_block_size"]
        assert_close(blocks.block(tokens[stop], count), oracle.block_logits(oracle.means[:stop], tokens[stop], count))
        place = stop


def test_weight_bytes_is_what_is_held_beyond_the_model(oracle: Oracle) -> None:
    blocks = Blocks(oracle.path, "torch")
    wanted = sizes.weight_bytes(blocks.config, 4, include_mtp=True) - sizes.weight_bytes(blocks.config, 4)
    assert blocks.layers.weight_bytes == pytest.approx(wanted, rel=1e-3)


def test_modules_with_other_weights(oracle: Oracle, tmp_path: Path) -> None:
    """Each module reads all its tensors again."""
    other = make_dspark(tmp_path, random.randrange(1 << 30), tokenizer=False)
    blocks = Blocks(oracle.path, "torch")
    for part in (blocks.main.model, blocks.layers):
        for old, new in reload(part, other, blocks.config, LoadOptions("float32")):  # type: ignore[arg-type]
            assert type(old) is type(new)
            vars(old).update(vars(new))
    fresh, found = Blocks(other, "torch"), []
    for each in (blocks, fresh):
        each.step(oracle.tokens[:30])
        found.append(each.block(oracle.tokens[30], 3))
    assert torch.equal(*found)
    assert fresh.layers.markov is not None and blocks.layers.markov is not None
    assert torch.equal(fresh.layers.markov._project, blocks.layers.markov._project)
