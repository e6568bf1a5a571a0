"""The MTP layer of Qwen3.8-Flash-Next: against transformers' layer and mixer, with SGLang's formula of their input
(transformers has no MTP for this model)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.planning.prepare import prepare
from tests.models import sparse
from tests.models.checkpoints import GATED_STREAMS, make_checkpoint
from tests.models.published import QWEN_3_8_FLASH_NEXT
from tests.models.qwen4_exp_mtp import MTPOracle
from tests.models.rows import all_rows
from tests.models.test_config import parse
from tests.models.test_mtp import Drafter
from tests.models.test_parity import assert_close

LENGTH = 60
TREE = {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}
every_row = pytest.mark.parametrize("row", all_rows())


class StreamDrafter(Drafter):
    """Reads all streams after the last layer, as the worker does."""

    def __init__(self, path: Path, row: str = "torch", **options: Any) -> None:
        super().__init__(path, row, **options)
        self.main.model.taps = HiddenTaps((self.config.num_layers,))

    def streams(self, tokens: list[int], decode: bool = False) -> tuple[Any, Tensor]:
        """A step of the model: its batch, and the streams [T, n D]."""
        batch, taps = self.batch(tokens, decode), self.main.model.taps
        taps.during(self.main.model.forward, batch)
        return batch, self.mtp.prepare(taps.take())

    def step(self, tokens: list[int], start: int, stop: int, decode: bool = False, sequence: int = 0) -> Tensor:
        batch, states = self.streams(tokens[start:stop], decode)
        return self.draft(batch, tokens[start + 1 : stop + 1], states)


class Oracle(MTPOracle):
    """With a text that has clear selections, and the layer's results for it."""

    def __init__(self, path: Path, folder: Path) -> None:
        super().__init__(path, folder)
        self.path = path
        self.tokens, (self.v, self.read) = sparse.clear_draw(self._draw, 5e-6)

    def _draw(self) -> tuple[list[int], tuple[Tensor, Tensor]]:
        tokens = torch.randint(0, 256, (LENGTH + 1,)).tolist()
        return tokens, self.layer(self.embedding(tokens[1:]), self.streams(tokens[:-1])[0])


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("mtp")
    path = make_checkpoint(GATED_STREAMS, folder / "model", 5, num_mtp_layers=1, tokenizer=False)
    return Oracle(path, folder / "one")


@every_row
def test_equals_transformers(oracle: Oracle, row: str) -> None:
    """A whole text; chunks and decodes that end within pools, below and beyond the selected ones."""
    tokens = oracle.tokens
    drafter = StreamDrafter(oracle.path, row, page_size=4)
    assert_close(v := drafter.step(tokens, 0, LENGTH), oracle.v)
    assert_close(drafter.mtp.logits(v), oracle.read @ oracle.head.T)
    drafter, got = StreamDrafter(oracle.path, row, seed=1, page_size=8), []
    for start, stop, decode in ((0, 5, False), (5, 30, False), (30, 31, True), (31, 34, True), (34, LENGTH, False)):
        got.append(drafter.step(tokens, start, stop, decode))
    assert_close(torch.cat(got), oracle.v)


@every_row
def test_draft_chains(oracle: Oracle, row: str) -> None:
    """The second draft step reads the streams of the first."""
    tokens = oracle.tokens
    drafter = StreamDrafter(oracle.path, row, page_size=4)
    first = drafter.step(tokens, 0, LENGTH - 1)
    again, read = oracle.layer(oracle.embedding(tokens[2:]), oracle.v[:-1])
    drafter = StreamDrafter(oracle.path, row, page_size=4)
    batch, _ = drafter.streams(tokens[: LENGTH - 1])
    second = drafter.draft(batch, tokens[2 : LENGTH + 1], first)
    assert_close(second, again)
    assert_close(drafter.mtp.logits(second), read @ oracle.head.T)


@every_row
def test_remembered_tokens(oracle: Oracle, row: str) -> None:
    """`remember` writes keys, values, index keys and keys of pools as `forward` does."""
    drafter, tokens = StreamDrafter(oracle.path, row, page_size=4), oracle.tokens
    for start, stop in ((0, 22), (22, 38)):  # the second begins within a pool
        batch, states = drafter.streams(tokens[start:stop])
        drafter.mtp.remember(0, torch.tensor(tokens[start + 1 : stop + 1]), states, batch)
    assert_close(drafter.step(tokens, 38, LENGTH), oracle.v[38:])


def test_headers_and_sizes(oracle: Oracle, tmp_path: Path) -> None:
    """The layer's tensors are known; the layer takes the ledger's memory."""
    config = load_model_config(oracle.path)
    check_headers(oracle.path, read_checkpoint(oracle.path), config, include_mtp=True)
    mtp: Any = StreamDrafter(oracle.path, page_size=4).mtp
    extra = sizes.weight_bytes(config, 4, True) - sizes.weight_bytes(config, 4)
    assert mtp.weight_bytes == pytest.approx(extra, rel=0.02)
    assert config.draft_state_width == 3 * config.hidden_size
    published = parse(tmp_path, QWEN_3_8_FLASH_NEXT)
    own = sizes.num_parameters(published, include_mtp=True) - sizes.num_parameters(published)
    assert own == pytest.approx(2.61e9, rel=0.002)
    tower = sizes.num_parameters(published) - sizes.num_parameters(dataclasses.replace(published, vision=None))
    assert tower == pytest.approx(0.449e9, rel=0.01)
    assert sizes.num_parameters(published) - tower == pytest.approx(125.74e9, rel=0.0001)  # without the table


@pytest.mark.parametrize(
    ("flags", "message"),
    [(TREE, "layers with a state for each request need chains; use --speculative-eagle-topk 1")],
)
def test_refused_flags(oracle: Oracle, flags: dict[str, Any], message: str) -> None:
    """Beside drafts of the MTP layer; without these flags they are planned."""
    common: dict[str, Any] = {"model_path": str(oracle.path), "device": "cpu", "speculative_algorithm": "NEXTN"}
    common |= {"skip_tokenizer_init": True}
    assert prepare(EngineArgs.from_kwargs(**common)).model.num_nextn_predict_layers == 1
    with pytest.raises(ConfigError, match=message):
        prepare(EngineArgs.from_kwargs(**common | flags))
