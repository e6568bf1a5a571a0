"""GLM-5.3-Flash: logits equal transformers' beyond the indexer's top-k, in every form of a step; config.json, headers,
and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.errors import ConfigError
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import MLAConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models import sparse, stepper
from tests.models.checkpoints import POOLED
from tests.models.parameters import num_active_parameters
from tests.models.published import GLM_5_3_FLASH
from tests.models.rows import all_rows
from tests.models.sparse import Made
from tests.models.test_config import parse
from tests.models.test_parity import assert_close, whole

every_row = pytest.mark.parametrize("row", all_rows())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """By fields of config.json."""
    return sparse.maker(POOLED, tmp_path_factory, lambda: torch.randint(0, 256, (sparse.PROMPT_LENGTH,)))


@every_row
def test_logits_equal_transformers(made: Callable[..., Made], row: str) -> None:
    """A whole prompt; chunks below and beyond the top-k that end within a pool, decodes, several tokens of a decode."""
    path, tokens, want = made()
    assert_close(whole(stepper.load(path, row, page_size=4), tokens), want)
    model = stepper.load(path, row, seed=1, page_size=8)
    assert_close(sparse.in_parts(model, tokens), want)


@every_row
def test_mixed_batches(made: Callable[..., Made], row: str) -> None:
    """Sequences below and beyond the top-k in one step, decodes and prompts."""
    path, tokens, want = made()
    model = stepper.load(path, row, seed=2, page_size=4)
    for got in model.run(tokens, sparse.MIXED_STEPS):
        assert_close(got, want[: len(got)])


@pytest.mark.parametrize(
    "fields",
    [
        {"index_kpool": 2, "index_topk": 18, "swiglu_limit": 0.5},
        {
            "linear_attn_config": {"num_heads": 2, "head_dim": 16, "gate_lower_bound": None, "safe_gate": False},
            "hc_mult": 2,
            "index_n_heads": 16,
        },
        {"dialect": "transformers", "index_kpool": 8, "n_group": 4, "topk_group": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_variants(made: Callable[..., Made], fields: dict[str, Any]) -> None:
    path, tokens, want = made(**fields)
    model = stepper.load(path, "torch", page_size=fields.get("index_kpool", 4))
    got = torch.cat((whole(model, tokens[:50]), whole(model, tokens[50:], decode=True)))
    assert_close(got, want)


def test_the_published_model(tmp_path: Path) -> None:
    config = parse(tmp_path, GLM_5_3_FLASH)
    assert sizes.num_parameters(config) == pytest.approx(313e9, rel=1e-2)
    assert num_active_parameters(config) == pytest.approx(17e9, rel=5e-2)
    (group,) = config.state_groups
    assert config.kv_layers == tuple(range(3, 45, 4)) and len(group.layers) == 34 and config.page_multiple == 4
    assert isinstance(config.attention, MLAConfig) and config.attention.pool == 4
    assert config.kv_bytes_per_token("bfloat16") == 11 * 2 * (512 + 2 * 128)
    facts = model_facts(GLM_5_3_FLASH)
    assert facts.num_parameters == pytest.approx(sizes.num_parameters(config), rel=1e-2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim is not 0"),
        ({"index_kpool": 3}, "index_kpool 3 does not divide index_topk 2048"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
        ({"indexer_types": ["full"] * 7 + ["shared"] * 38}, "indexer_types has layers that share a selection"),
        ({"layer_types": ["linear_attention"] * 45}, "have no layer of MLA"),
        ({"linear_attn_config": {"gate_lower_bound": 1.0}}, "gate_lower_bound must be negative"),
    ],
)
def test_refused_configs(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path, GLM_5_3_FLASH | {"text_config": GLM_5_3_FLASH["text_config"] | wrong})


def test_headers_and_sizes(made: Callable[..., Made]) -> None:
    """All tensors are known by the names of the files; the weights take the memory of the ledger."""
    path, _, _ = made()
    config = load_model_config(path)
    check_headers(path, read_checkpoint(path), config)
    model = stepper.load(path, "torch", page_size=4).model
    assert model.weight_bytes == pytest.approx(sizes.weight_bytes(config, 4), rel=0.02)  # type: ignore[attr-defined]
    fields = json.loads((path / "config.json").read_text())
    assert fields["architectures"] == ["Glm5NextForConditionalGeneration"]
