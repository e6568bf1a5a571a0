"""The MTP layers of Step 3.5 and 3.7: windows, heads of their own, and states before the final norm, against
transformers' layers with vLLM's formula (`tests.models.step_mtp`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import GQAConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.models.loader import LoadOptions, reload
from moe_engine.models.quantized_copy.checkpoint import quantize_checkpoint
from moe_engine.models.quantized_copy.target import Target
from tests.models.checkpoints import make_checkpoint
from tests.models.rows import all_rows
from tests.models.step_mtp import StepOracle
from tests.models.test_mtp import Drafter
from tests.models.test_parity import assert_close
from tests.models.test_step import PUBLISHED, parse

LENGTH, LAYERS = 70, 3  # beyond three windows of 20
every_row = pytest.mark.parametrize("row", all_rows())


class ResidualDrafter(Drafter):
    """Reads the residual after the last layer, as the worker does."""

    def __init__(self, path: Path, row: str = "torch", **options: Any) -> None:
        super().__init__(path, row, **options)
        self.main.model.taps = HiddenTaps((self.config.num_layers,))

    def states(self, tokens: list[int], decode: bool = False, sequence: int = 0) -> tuple[Any, Tensor]:
        """A step of the model: its batch, and the residual [T, D]."""
        batch, taps = self.batch(tokens, decode, sequence), self.main.model.taps
        taps.during(self.main.model.forward, batch)
        return batch, self.mtp.prepare(taps.take())


class Text(StepOracle):
    """With a random text, and what the layers give for it in turn: layer j reads the token j + 1 further."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path
        self.tokens = torch.randint(0, 256, (LENGTH + LAYERS,)).tolist()
        v, self.v, self.logits = self.states(self.tokens[:LENGTH]), [], []
        for index in range(LAYERS):
            v, logits = self.layer(index, self.tokens[index + 1 : index + 1 + LENGTH], v)
            self.v.append(v)
            self.logits.append(logits)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Text:
    path = tmp_path_factory.mktemp("mtp")
    return Text(make_checkpoint("step3p7", path, 5, num_mtp_layers=LAYERS, tokenizer=False))


@every_row
def test_equal_transformers_layers(oracle: Text, row: str) -> None:
    """In chunks, single tokens, and several at once as after a verification; another sequence in between."""
    drafter, tokens = ResidualDrafter(oracle.path, row, page_size=16, seed=1), oracle.tokens
    steps = [(0, 37, False), (37, 50, False), *((i, i + 1, True) for i in range(50, 56)), (56, 60, True)]
    found: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    for start, stop, decode in [*steps, (60, LENGTH, False)]:
        batch, v = drafter.states(tokens[start:stop], decode)
        for index in range(LAYERS):
            v = drafter.draft(batch, tokens[start + 1 + index : stop + 1 + index], v, index)
            found[index].append(v)
        drafter.states(tokens[stop : stop + 2], sequence=1)
    for index in range(LAYERS):
        v = torch.cat(found[index])
        assert_close(v, oracle.v[index])
        assert_close(drafter.mtp.logits(v, layer=index), oracle.logits[index])


@every_row
def test_remembered_tokens(oracle: Text, row: str) -> None:
    """`remember` writes keys and values as `forward` does."""
    drafter, tokens = ResidualDrafter(oracle.path, row, page_size=16), oracle.tokens
    batch, states = drafter.states(tokens[:50])
    drafter.mtp.remember(0, torch.tensor(tokens[1:51]), states, batch)
    batch, states = drafter.states(tokens[50:LENGTH])
    assert_close(drafter.draft(batch, tokens[51 : LENGTH + 1], states), oracle.v[0][50:])


def test_headers_sizes_and_modules(oracle: Text, tmp_path: Path) -> None:
    config, files = load_model_config(oracle.path), read_checkpoint(oracle.path)
    check_headers(oracle.path, files, config, include_mtp=True)
    mtp: Any = ResidualDrafter(oracle.path).mtp
    extra = sizes.weight_bytes(config, 4, True) - sizes.weight_bytes(config, 4)
    assert mtp.weight_bytes == pytest.approx(extra, rel=0.02)
    again = dict(reload(mtp, oracle.path, config, LoadOptions("float32")))
    heads = [head for module in again if (head := getattr(module, "weight", None)) is not None]
    assert heads and all(layer.head in again for layer in mtp._layers)
    head = "model.layers.4.shared_head.head.weight"
    del files[head]
    with pytest.raises(CheckpointError, match=rf"{head} \[320, 64\] is missing"):
        check_headers(oracle.path, files, config, include_mtp=True)
    check_headers(oracle.path, files, config)


def test_the_published_layers(tmp_path: Path) -> None:
    config = parse(tmp_path, PUBLISHED)
    assert config.windowed_drafts == (45, 46, 47) and config.draft_state_width == 4096
    own = config.attention_of(46)
    assert isinstance(own, GQAConfig) and own.num_heads == 96 and config.rope_of(47).theta == 1e4
    assert config.window_of(45) == 512 and not config.is_mtp_moe and config.drafts_read_residual
    attention = 4096 * 128 * (2 * 96 + 2 * 8) + 4096 * 96
    layer = attention + 3 * 4096 * 11264 + 2 * 4096 * 4096 + 4096 * 128896 + 5 * 4096 + 2 * 128
    assert sizes.num_parameters(config, include_mtp=True) - sizes.num_parameters(config) == 3 * layer
    saved = PUBLISHED | {"layer_types": PUBLISHED["layer_types"][:45], "mtp_layer_types": ["sliding_attention"] * 3}
    assert parse(tmp_path, saved).mtp == config.mtp
    for wrong, message in (
        ({"mtp_layer_types": ["full_attention"] * 3}, "layer_types has MTP layers without a window"),
        (
            {"moe_layers_enum": ",".join(map(str, range(3, 46)))},
            "moe_layers_enum has an MTP layer: MTP layers with experts are not supported",
        ),
        ({"swiglu_limits": [0.0] * 47 + [7.0]}, "swiglu_limits has a limit of a layer without experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(tmp_path, PUBLISHED | wrong)


@every_row
def test_a_copy_in_fp8(tmp_path: Path, row: str) -> None:
    """`moe-engine quantize` leaves heads and `eh_proj` as they are; MLPs are read in FP8 blocks."""
    sizes_of_blocks = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
    source = make_checkpoint("step3p7", tmp_path / "a", 3, num_mtp_layers=1, tokenizer=False, **sizes_of_blocks)
    quantize_checkpoint(source, tmp_path / "b", Target("fp8"), lambda _: None)
    names = load_file(tmp_path / "b" / "model.safetensors")
    scaled = {name for name in names if name.startswith("model.layers.3.") and name.endswith("_scale_inv")}
    assert len(scaled) == 3 and not [name for name in scaled if "head" in name or "eh_proj" in name]
    tokens, found, states = torch.randint(0, 256, (31,)).tolist(), [], None
    for path in (source, tmp_path / "b"):  # the states of one model, whose routers the other's rounding may turn
        drafter = ResidualDrafter(path, row)
        batch, own = drafter.states(tokens[:-1])
        states = own if states is None else states
        found.append(drafter.mtp.logits(drafter.draft(batch, tokens[1:], states)))
    assert 0 < float((found[1] - found[0]).norm() / found[0].norm()) < 0.1
