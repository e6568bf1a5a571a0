"""The DSpark layers of DeepSeek V4.1 against `V41DSparkReference`: blocks after prompts, chunks and single tokens."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_engine.errors import ConfigError
from moe_engine.models import sizes
from moe_engine.models.config_file import load_model_config
from moe_engine.models.loader import LoadOptions, reload
from tests.models.rows import all_rows
from tests.models.test_parity import assert_close
from tests.models.test_v4_dspark import LENGTH, Blocks
from tests.models.v41_dspark import DSPARK, V41DSparkReference, make_v41_dspark

TIE = 1e-4


class Made:
    """A checkpoint with a text, and blocks after its beginnings; rounding decides no choice."""

    def __init__(self, path: Path) -> None:
        self.path = make_v41_dspark(path, random.randrange(2**31))
        reference = V41DSparkReference(path)
        for _ in range(50):
            self.tokens = [random.randrange(5, 250) for _ in range(LENGTH + 1)]
            reference.margin = math.inf
            means = reference.states(self.tokens[:-1])
            self.blocks: dict[int, Tensor] = {}
            for step, stop in enumerate((1, 9, 15, 16, 17, 50, LENGTH)):
                count = 1 + step % DSPARK["dspark_block_size"]
                self.blocks[stop] = reference.block_logits(means[:stop], self.tokens[stop], count)
            if reference.margin > TIE:
                return
        raise AssertionError("no clear draw")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("v41_dspark"))


@pytest.mark.parametrize("row", all_rows())
def test_blocks_behind_a_text_of_each_length(made: Made, row: str) -> None:
    """Within the window of 16, at its end, and beyond; blocks of all lengths."""
    tokens, blocks, place = made.tokens, Blocks(made.path, row), 0
    for stop, wanted in made.blocks.items():
        blocks.step(tokens[place:stop], stop in (16, 17, LENGTH))
        blocks.step(tokens[: stop - place], sequence=1)
        assert_close(blocks.block(tokens[stop], len(wanted)), wanted)
        place = stop


def test_weight_bytes_is_what_is_held_beyond_the_model(made: Made) -> None:
    blocks = Blocks(made.path, "torch")
    wanted = sizes.weight_bytes(blocks.config, 4, include_mtp=True) - sizes.weight_bytes(blocks.config, 4)
    assert blocks.layers.weight_bytes == pytest.approx(wanted, rel=1e-3)


def test_modules_with_other_weights(made: Made, tmp_path: Path) -> None:
    """Each module reads all its tensors again."""
    other = make_v41_dspark(tmp_path, random.randrange(1 << 30))
    blocks = Blocks(made.path, "torch")
    for part in (blocks.main.model, blocks.layers):
        for old, new in reload(part, other, blocks.config, LoadOptions("float32")):  # type: ignore[arg-type]
            assert type(old) is type(new)
            vars(old).update(vars(new))
    found = []
    for each in (blocks, Blocks(other, "torch")):
        each.step(made.tokens[:30])
        found.append(each.block(made.tokens[30], 3))
    assert torch.equal(*found)


def test_config(made: Made, tmp_path: Path) -> None:
    config = load_model_config(made.path)
    own, moe = config.moe_of(config.num_layers), config.moe
    assert own is not None and moe is not None and (own.num_experts, own.top_k) == (6, 3)
    assert config.moe_of(config.num_layers - 1) == moe and (moe.num_experts, moe.top_k) == (8, 2)
    assert config.own_block is not None and config.own_block.tapped == (3, 6, 8)
    raw = json.loads((made.path / "config.json").read_text())
    for fields, message in (
        ({"dspark_num_experts_per_tok": 7}, "dspark_num_experts_per_tok 7 is more than dspark_n_routed_experts 6"),
        ({"dspark_target_layer_ids": [-1, 3]}, "dspark_target_layer_ids has -1"),
        ({"dspark_target_layer_ids": [3, 9]}, "the model has layers 0 to 8"),
    ):
        text = raw | {"text_config": raw["text_config"] | fields}
        (tmp_path / "config.json").write_text(json.dumps(text))
        with pytest.raises(ConfigError, match=message):
            load_model_config(tmp_path)
