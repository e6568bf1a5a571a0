"""DeepSeek V4: logits equal transformers' in every form of a step, requests in an engine, sizes, config.json."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.models.config_file import load_model_config
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.planning.prepare import prepare
from tests.models import stepper
from tests.models.entry_steps import check_ledger, check_mixed_batches, check_parts
from tests.models.family_parity import FORMS, NUM_TOKENS, compare, make_family, serve
from tests.models.parity_families import OWN_FAMILIES
from tests.models.rows import all_rows
from tests.models.sparse import clear_draw
from tests.models.test_parity import assert_close, whole
from tests.models.v4_checkpoints import CSA, FIELDS, HCA, PUBLISHED_RATES, SLIDING, load_v4, make_v4

every_row = pytest.mark.parametrize("row", all_rows())
TIE = 1e-4
"""Relative difference of scores below which other kernels may select another entry or expert."""


class Made:
    """A checkpoint with transformers' logits of some tokens; rounding decides no selection of entries or experts."""

    def __init__(self, path: Path, **fields: Any) -> None:
        self.path = make_v4(path, random.randrange(2**31), tokenizer=False, **fields)
        self._model = load_v4(path)
        self.tokens, self.logits = clear_draw(self._drawn, TIE)

    @torch.no_grad()
    def _drawn(self) -> tuple[list[int], Tensor]:
        tokens = [random.randrange(5, 250) for _ in range(150)]
        return tokens, self._model(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("v4"))


@every_row
def test_logits_equal_transformers(made: Made, row: str) -> None:
    check_parts(made.path, row, made.tokens, made.logits, cut=37)


@every_row
def test_mixed_batches(made: Made, row: str) -> None:
    check_mixed_batches(made.path, row, made.tokens, made.logits, chunk=47)


@pytest.mark.drawn(5, group="variants of DeepSeek V4")
@every_row
@pytest.mark.parametrize(
    "fields",
    [
        PUBLISHED_RATES,
        {"layer_types": [CSA] * 5, "index_topk": 1},
        {"layer_types": [SLIDING] * 5},
        {"layer_types": [HCA, HCA, CSA, HCA, CSA], "num_hash_layers": 0, "hc_mult": 2, "rms_norm_eps": 1e-2},
        {"num_hash_layers": 5, "o_groups": 4, "compress_rates": {CSA: 8, HCA: 4}, "rope_scaling": None},
    ],
)
def test_variants(tmp_path: Path, fields: dict[str, Any], row: str) -> None:
    want = Made(tmp_path, **fields)
    page = load_model_config(want.path).page_multiple
    model = stepper.load(want.path, row, page_size=page)
    got = torch.cat((whole(model, want.tokens[:140]), *(whole(model, [t], decode=True) for t in want.tokens[140:])))
    assert_close(got, want.logits)


@pytest.mark.drawn(3, group="requests of DeepSeek V4")
@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize("form", ["cached", "dp 2", "ep 2, dp 2, all-to-all", "n-gram drafts", "retracted", "tiered"])
def test_requests_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    scarce = {"max_total_tokens": 400, "max_running_requests": 8, "context_length": 256}
    monkeypatch.setitem(FORMS, "retracted", scarce)
    monkeypatch.setitem(FORMS, "tiered", {**scarce, "enable_hierarchical_cache": True, "hicache_ratio": 4.0})
    seed = random.randrange(2**31)
    family = make_family("deepseek_v4", tmp_path / "v4", seed)
    asked = family.prompts(seed, 8, 100)
    result = compare(family, asked, serve(family.path, asked, NUM_TOKENS, form))
    assert result.tokens and not result.wrong and result.error < 1e-4, result


@pytest.mark.drawn(1, group="requests of models of windows alone")
@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("deepseek_v4", {"layer_types": [SLIDING] * 5}),
        ("deepseek_v41", {
            "compress_ratios": [0] * 9, "kv_source_layer_ids": [], "index_source_layer_ids": [],
            "candidate_source_layer_id": -1,
        }),
    ],
)  # fmt: skip
def test_requests_of_models_of_windows_alone(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    seed = random.randrange(2**31)
    family = OWN_FAMILIES[kind](kind, tmp_path / "model", seed, **fields)
    asked = family.prompts(seed, 4, 90)
    result = compare(family, asked, serve(family.path, asked, NUM_TOKENS, "cached"))
    assert result.tokens and not result.wrong and result.error < 1e-4, result


def test_ranks_with_parts_of_groups_of_heads_are_refused(tmp_path: Path) -> None:
    path = make_v4(tmp_path, num_attention_heads=6, o_groups=3)
    flags = {"model_path": str(path), "device": "cpu", "skip_tokenizer_init": True, "tp_size": 2}
    with pytest.raises(ConfigError, match=r"3 groups of attention heads \(o_groups\) can neither be divided over 2"):
        prepare(EngineArgs.from_kwargs(**flags))
    assert prepare(EngineArgs.from_kwargs(**flags, attn_dp_size=2)).parallel.topology.attn_tp_size == 1


def test_memory_is_what_the_ledger_says(made: Made) -> None:
    check_ledger(made.path)


def test_pages_have_whole_entries(made: Made, tmp_path: Path) -> None:
    assert prepare(EngineArgs.from_kwargs(model_path=str(made.path))).page_size == 16
    assert prepare(EngineArgs.from_kwargs(model_path=str(made.path), page_size=32)).page_size == 32
    with pytest.raises(ConfigError, match=r"--page-size 8: .* has entries of 16 tokens; use a multiple"):
        prepare(EngineArgs.from_kwargs(model_path=str(made.path), page_size=8))
    with pytest.raises(ConfigError, match=r"do not fit --chunked-prefill-size, .* multiples of 16"):
        prepare(EngineArgs.from_kwargs(model_path=str(made.path), chunked_prefill_size=24))
    narrow = make_v4(tmp_path, tokenizer=False, **PUBLISHED_RATES)
    with pytest.raises(ConfigError, match=r"--dtype bfloat16: entries of 128 tokens with 32 channels .* use float32"):
        prepare(EngineArgs.from_kwargs(model_path=str(narrow), dtype="bfloat16"))


def test_scarce_memory_is_for_contexts_more_than_for_windows(made: Made) -> None:
    flags = {"model_path": str(made.path), "context_length": 512, "max_total_tokens": 16384, "chunked_prefill_size": 32}
    found = [prepare(EngineArgs.from_kwargs(**flags, **own)) for own in ({}, {"swa_full_tokens_ratio": 0.5})]
    assert [config.num_window_slots for config in found] == [1632, 8192]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        ({"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": "q_b_proj"}, "--enable-lora"),
    ],
)
def test_flags_that_are_not_available_are_refused(made: Made, flags: dict[str, Any], named: str) -> None:
    with pytest.raises(NotAvailableYet, match=named):
        prepare(EngineArgs.from_kwargs(model_path=str(made.path), **flags))


def test_both_dialects_of_the_config_are_read(tmp_path: Path) -> None:
    import transformers

    published = FIELDS | {"compress_rates": None, "layer_types": None, "compress_ratios": [0, 128, 4, 128, 4, 0]}
    published |= {"sliding_window": 128, "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    published |= {"num_nextn_predict_layers": 1}
    raw = {key: value for key, value in published.items() if value is not None}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(raw))
    config = transformers.DeepseekV4Config(**(raw | {"compress_ratios": raw["compress_ratios"][:5]}))
    config.architectures = ["DeepseekV4ForCausalLM"]
    config.save_pretrained(tmp_path / "b")
    first, second = (load_model_config(tmp_path / name) for name in "ab")
    assert isinstance(first.attention, CompressedConfig) and first.attention.rates == (0, 128, 4, 128, 4)
    for name in ("attention", "rope", "other_layers", "moe", "streams", "windows", "cache_groups"):
        assert getattr(first, name) == getattr(second, name), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"o_groups": 3}, "o_groups 3 does not divide the 4 heads"),
        ({"sliding_window": 15}, "sliding_window 15 is less than the 16 tokens"),
        ({"index_head_dim": 4}, "index_head_dim 4 is less than the rotated width 8"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types needs 5 of"),
        ({"layer_types": None, "compress_ratios": [0, 3, 4, 8, 4]}, "compress_ratios needs 5 of"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe"]}, "hash_moe after moe is not supported"),
        ({"scoring_func": "relu"}, "scoring_func 'relu' is unknown"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is not 1"),
    ],
)
def test_bad_configs_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    raw = {key: value for key, value in (FIELDS | fields).items() if value is not None}
    raw |= {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)
