"""Qwen3.8-Flash-Next against transformers beyond the indexer's budget, in every form of a step; config.json, headers,
and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.config_sections.engram import EngramConfig
from moe_engine.models.header_check import check_headers
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models import sparse, stepper
from tests.models.byte_tokenizer import EOS
from tests.models.checkpoints import GATED_STREAMS, hub_fields
from tests.models.rows import all_rows
from tests.models.sparse import Made
from tests.models.test_config import parse
from tests.models.test_parity import assert_close, whole

every_row = pytest.mark.parametrize("row", all_rows())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """By fields of config.json."""
    return sparse.maker(GATED_STREAMS, tmp_path_factory, drawn_prompt)


def drawn_prompt() -> Tensor:
    """With ends of texts, over which no n-gram reaches."""
    tokens = torch.randint(0, 256, (sparse.PROMPT_LENGTH,))
    tokens[torch.randint(0, sparse.PROMPT_LENGTH, (5,))] = EOS
    return tokens


@every_row
def test_logits_equal_transformers(made: Callable[..., Made], row: str) -> None:
    """A whole prompt; chunks below and beyond the budget that end within a pool, decodes, several tokens of a
    decode."""
    path, tokens, want = made()
    assert_close(whole(stepper.load(path, row, page_size=4), tokens), want)
    model = stepper.load(path, row, seed=1, page_size=8)
    assert_close(sparse.in_parts(model, tokens), want)


@every_row
def test_mixed_batches(made: Callable[..., Made], row: str) -> None:
    """Sequences below and beyond the budget in one step, decodes and prompts."""
    path, tokens, want = made()
    model = stepper.load(path, row, seed=2, page_size=4)
    for got in model.run(tokens, sparse.MIXED_STEPS):
        assert_close(got, want[: len(got)])


@pytest.mark.parametrize(
    "fields",
    [
        {"output_gate_type": "silu", "hc_count": 2, "ngram_size": 4, "heads_per_ngram": 1, "ple_embed_dim": 24},
        {"indexer_compress_ratio": 2, "indexer_budget": 18, "ple_layer_ids": [3], "ple_conv_kernel_size": 2},
        {"indexer_compress_ratio": 8, "ple_layer_ids": [], "num_key_value_heads": 1, "dialect": "transformers"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_variants(made: Callable[..., Made], fields: dict[str, Any]) -> None:
    path, tokens, want = made(**fields)
    model = stepper.load(path, "torch", page_size=fields.get("indexer_compress_ratio", 4))
    got = torch.cat((whole(model, tokens[:50]), whole(model, tokens[50:], decode=True)))
    assert_close(got, want)


def test_numbers_of_rows_and_factors_are_those_of_transformers() -> None:
    """With primes above 20 million, as published."""
    from transformers.models.qwen4_exp import modeling_qwen4_exp as reference

    seed = random.randrange(1 << 40)
    engram = EngramConfig((0, 4, 5), (0, 0, 0), 3, 4, 16, 20_000_000, 248_320, 1, seed=seed)
    for index, (layer, primes) in enumerate(zip(engram.layers, engram.primes)):
        factors = reference._build_layer_multipliers(248_320, 3, index, seed)
        assert list(engram.multipliers(layer)) == factors.tolist()
        numbers = (index * 8 + head + 1 for head in (0, 7))
        assert [primes[0], primes[7]] == [reference._find_nth_prime_after(19_999_999, n) for n in numbers]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"indexer_kv_heads": 2}, "indexer_kv_heads 2 is not supported"),
        ({"indexer_compress_ratio": 3}, "indexer_budget 16 is not a multiple of indexer_compress_ratio 3"),
        ({"indexer_head_dim": 8}, "indexer_head_dim 8 is less than the 12 rotated channels"),
        ({"ple_layer_ids": [2]}, "ple_layer_ids must be numbers of linear attention layers"),
        ({"ple_embed_dim": 30}, "ple_embed_dim 30 is not a multiple of the 4 rows"),
        ({"output_gate_type": "gelu"}, "output_gate_type 'gelu' is not supported"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has no layer with attention"),
        ({"hc_count": 1}, "hc_count"),
        ({"hidden_act": "relu"}, "hidden_act"),
    ],
)
def test_refused_configs(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    text = hub_fields(GATED_STREAMS) | {"model_type": "qwen4_exp_text"} | wrong
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path, {"architectures": ["Qwen4ExpForConditionalGeneration"], "text_config": text})


def test_headers_and_sizes(made: Callable[..., Made], tmp_path: Path) -> None:
    """All tensors are known by the names of the files; parameters are those of transformers' model without the tables;
    the weights take the memory of the ledger."""
    path, _, _ = made()
    config = load_model_config(path)
    files = read_checkpoint(path)
    check_headers(path, files, config)
    oracle = sparse.load(path).model
    tables = sum(table.numel() for name, table in oracle.named_parameters() if "ngram_embedding" in name)
    head = config.vocab_size * config.hidden_size
    assert sizes.num_parameters(config) == oracle.num_parameters() - tables + head
    model: Any = stepper.load(path, "torch", page_size=4).model
    assert model.weight_bytes == pytest.approx(sizes.weight_bytes(config, 4), rel=0.02)
    assert config.page_multiple == 4 and config.kv_bytes_per_token("float32") == 2 * 4 * (2 * 2 * 24 + 16)
    facts = model_facts(json.loads((path / "config.json").read_text()))
    beside = 2 * 32 * 4 * 64  # of rows of n-grams, which the planner leaves out
    text = sizes.num_parameters(replace(config, vision=None))
    assert facts.num_parameters == pytest.approx(text - head - beside, rel=0.03)
    known = {name for module in model.modules() for name in files if name.startswith(module.prefixes)}
    assert known == files.keys()


def test_factors_of_another_config_are_refused(made: Callable[..., Made], tmp_path: Path) -> None:
    path, _, _ = made()
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    fields = json.loads((copy / "config.json").read_text())
    fields["text_config"]["seed"] += 1
    (copy / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"layer_multipliers is .* check its n-gram fields"):
        stepper.load(copy, "torch", page_size=4)
