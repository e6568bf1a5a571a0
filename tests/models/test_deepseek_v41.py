"""DeepSeek V4.1: logits equal the formulas in float64 in every form of a step; sizes; config.json."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.errors import ConfigError
from moe_engine.kernels.ops.block_rounding import round_e2m1, round_e2m1_small, round_e4m3
from moe_engine.models.config_file import load_model_config
from moe_engine.models.formats.fp4_experts import FP4ExpertsFormat
from moe_engine.models.tensors.model import model_tensors
from tests.models import stepper
from tests.models.deepseek_v41 import FIELDS, V41Reference, make_v41
from tests.models.entry_steps import PAGE, check_ledger, check_mixed_batches, check_parts
from tests.models.rows import all_rows
from tests.models.test_parity import assert_close, whole
from tests.models.v41_tower import IMAGE

every_row = pytest.mark.parametrize("row", all_rows())
TIE = 1e-4


class Made:
    """A checkpoint with the logits of some tokens; rounding decides no selection of entries or experts."""

    def __init__(self, path: Path, **fields: Any) -> None:
        self.path = make_v41(path, random.randrange(2**31), **fields)
        self.tokens, self.logits = clear_text(path, lambda: [random.randrange(5, 250) for _ in range(110)])


def clear_text(path: Path, draw: Callable[[], list[int]]) -> tuple[list[int], Tensor]:
    """Drawn tokens in which rounding decides no selection, with their logits."""
    reference = V41Reference(path)
    for _ in range(50):
        tokens = draw()
        reference.margin = math.inf
        logits = reference.logits(tokens)
        if reference.margin > TIE:
            return tokens, logits
    raise AssertionError("no clear draw")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("v41"))


@every_row
def test_logits_equal_the_formulas(made: Made, row: str) -> None:
    check_parts(made.path, row, made.tokens, made.logits, cut=36)


@every_row
def test_mixed_batches(made: Made, row: str) -> None:
    check_mixed_batches(made.path, row, made.tokens, made.logits, chunk=45)


@every_row
@pytest.mark.parametrize(
    "fields",
    [
        {"candidate_source_layer_id": -1, "compress_ratios": [0, 1, 1, 1, 1, 2, 2, 2, 2], "index_topk": 1,
         "kv_source_layer_ids": [1, 3, 5], "index_source_layer_ids": [1, 3, 4, 5]},
        {"compress_ratios": [0] * 9, "kv_source_layer_ids": [], "index_source_layer_ids": [],
         "candidate_source_layer_id": -1, "hc_mult": 2},
        {"compress_ratios": [1] * 9, "kv_source_layer_ids": [0], "index_source_layer_ids": [0, 2, 3],
         "candidate_source_layer_id": 2, "candidate_topk_blocks": 2, "candidate_block_size": 8, "rope_scaling": {}},
    ],
)  # fmt: skip
@pytest.mark.each_value
def test_variants(tmp_path: Path, fields: dict[str, Any], row: str) -> None:
    want = Made(tmp_path, **fields)
    model = stepper.load(want.path, row, page_size=PAGE)
    got = torch.cat((whole(model, want.tokens[:100]), *(whole(model, [t], decode=True) for t in want.tokens[100:])))
    assert_close(got, want.logits)


@every_row
def test_the_placeholder_is_an_ordinary_token_without_a_tower(made: Made, row: str) -> None:
    def draw() -> list[int]:
        text = [random.randrange(5, 250) for _ in range(12)]
        return [*text[:7], IMAGE, *text[7:]]

    tokens, want = clear_text(made.path, draw)
    assert_close(whole(stepper.load(made.path, row, page_size=PAGE), tokens), want)


def test_memory_is_what_the_ledger_says(made: Made) -> None:
    check_ledger(made.path)


PUBLISHED: dict[str, Any] = {
    "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3, "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048, "candidate_block_size": 8, "index_n_heads": 32, "index_head_dim": 128,
    "index_topk": 512, "moe_intermediate_size": 2304, "n_routed_experts": 384, "num_experts_per_tok": 6,
    "max_position_embeddings": 1048576, "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
    "engram_vocab_size": 16000000, "engram_n_heads": 8, "engram_head_dim": 256,
}  # fmt: skip
"""The language model of V4.1-Flash."""


def test_sizes_of_the_published_model(tmp_path: Path) -> None:
    """552 billion parameters; entries and index keys of one layer of single tokens and three of pairs."""
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    outer = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
    text = FIELDS | PUBLISHED | {"engram_compressed_vocab_size": 99092}
    raw = outer | {"text_config": text, "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(tmp_path)
    count = sum(spec.num_elements * spec.copies for spec in model_tensors(config))
    assert count == pytest.approx(552e9, rel=0.01)
    assert config.entry_bytes_per_token("bfloat16") == 2 * (512 + 128) * 5 // 2
    assert isinstance(config.weight_format, FP4ExpertsFormat) and config.weight_format.block == (32, 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engram_num_embeddings": [630, 835]}, "engram_num_embeddings 835 of layer 3 is not the 834 rows"),
        ({"gate_temp": 0.5}, "gate_temp is not 1"),
        ({"compress_ratios": [0, 0, 4, 4, 4, 1, 1, 1, 1]}, "compress_ratios needs 9 of 0, 1, 2"),
        ({"kv_source_layer_ids": [3, 4, 5]}, "kv_source_layer_ids .* has no layer up to layer 2, which reads entries"),
        ({"kv_source_layer_ids": [2, 4]}, "read entries of layer 4 at other rates"),
        ({"kv_source_layer_ids": [1, 2, 5]}, "has layers with compress_ratios 0"),
        ({"kv_source_layer_ids": [2, 2, 5]}, "must name each layer once"),
        ({"index_source_layer_ids": [2, 5]}, "index_source_layer_ids has no layer 4, which writes entries"),
        ({"candidate_source_layer_id": 6}, "candidate_source_layer_id 6 is not among"),
        ({"candidate_source_layer_id": 2}, "select among other entries"),
    ],
)
def test_bad_configs_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    text = FIELDS | {"engram_compressed_vocab_size": 99092} | fields
    raw = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)


def test_rounding() -> None:
    """The nearest value of the format; halfway the one with an even code; scales are powers of two, or in e4m3."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    x = torch.randn(50, 64) * torch.rand(50, 1).mul(20).exp2()
    for round_, size, limit in ((round_e2m1, 32, 6.0), (round_e2m1_small, 16, 6.0), (round_e4m3, 32, 448.0)):
        blocks, found = x.unflatten(1, (-1, size)), round_(x).unflatten(1, (-1, size))
        most = blocks.abs().amax(2, keepdim=True)
        scale = (most / limit).to(torch.float8_e4m3fn).float() if size == 16 else (most / limit).log2().ceil().exp2()
        scaled = (blocks / scale).clamp(-limit, limit)
        nearest = scaled.to(torch.float8_e4m3fn).float()
        if limit == 6.0:
            nearest = values[(scaled.abs().unsqueeze(3) - values).abs().argmin(3)] * scaled.sign()
        assert torch.equal(found, nearest * scale)
        assert round_(x[:, :24]) is not None and torch.equal(round_(x[:, :24]), x[:, :24]) == (24 % size > 0)
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0] + [0.0] * 23])
    assert round_e2m1(ties)[0, :9].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0, 6.0]
