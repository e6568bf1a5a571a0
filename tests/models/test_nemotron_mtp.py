"""The MTP layer of Nemotron-3 against transformers' layers with vLLM's formula (`tests.models.nemotron_mtp`)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from tests.models.checkpoints import make_checkpoint
from tests.models.nemotron_mtp import NemotronOracle
from tests.models.published import NEMOTRON_3_NANO
from tests.models.rows import all_rows
from tests.models.test_config import parse
from tests.models.test_mtp import Drafter
from tests.models.test_parity import assert_close

LATENT = {"moe_latent_size": 40}
every_row = pytest.mark.parametrize("row", all_rows())


@every_row
@pytest.mark.parametrize("sizes_of", [{}, LATENT], ids=["plain", "latent"])
def test_equals_transformers_layers(tmp_path: Path, row: str, sizes_of: dict[str, int]) -> None:
    """Chunks, single tokens, several at once as after a verification; then a draft step from the layer's own state."""
    path = make_checkpoint(
        "nemotron_h", tmp_path, random.randrange(2**31), num_mtp_layers=1, tokenizer=False, **sizes_of
    )
    oracle, tokens = NemotronOracle(path), torch.randint(0, 256, (72,)).tolist()
    want = oracle.layer(tokens[1:-1], states := oracle.states(tokens[:-2]))
    drafter = Drafter(path, row, page_size=16)
    steps = [(0, 40, False), *((i, i + 1, True) for i in range(40, 44)), (44, 47, True), (47, 70, False)]
    v = torch.cat([drafter.step(tokens, start, stop, decode) for start, stop, decode in steps])
    assert_close(v, want)
    assert_close(drafter.mtp.logits(v), oracle.logits(want))
    more = drafter.draft(drafter.batch([tokens[-1]], decode=True), [tokens[-1]], v[-1:])
    assert_close(more, oracle.layer([*tokens[1:-1], tokens[-1]], torch.cat((states, want[-1:])))[-1:])


def test_headers_and_sizes(tmp_path: Path) -> None:
    path = make_checkpoint("nemotron_h", tmp_path / "a", num_mtp_layers=2, tokenizer=False, **LATENT)
    config = load_model_config(path)
    check_headers(path, read_checkpoint(path), config, include_mtp=True)
    extra = sizes.weight_bytes(config, 4, True) - sizes.weight_bytes(config, 4)
    assert Drafter(path).mtp.weight_bytes == pytest.approx(extra, rel=0.02)
    (tmp_path / "b").mkdir()
    drafts = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    published = parse(tmp_path / "b", NEMOTRON_3_NANO | drafts)
    own = sizes.num_parameters(published, include_mtp=True) - sizes.num_parameters(published)
    experts = 128 * 2 * 2688 * 1856 + 2 * 2688 * 3712 + 128 * (2688 + 1)
    assert own == experts + 2 * 2688 * 128 * (32 + 2) + 2 * 2688**2 + 5 * 2688
    assert published.kv_bytes_per_token("bfloat16", True) == 7 * 2 * 2 * 128 * 2
