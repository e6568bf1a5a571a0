"""gpt-oss: MXFP4 checkpoints, sizes, the effect of clamped experts and sinks, and refusals."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.kernels import tables
from moe_engine.kernels.backends import plan_kernels
from moe_engine.kernels.device import Device
from moe_engine.kernels.registry import select
from moe_engine.kernels.weight_forms import FOUR_BITS, families
from moe_engine.models import sizes
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.formats.protocol import FAMILIES
from moe_engine.models.header_check import check_headers
from moe_engine.models.needs import need_of_model
from moe_engine.models.weights import WeightReader
from moe_engine.parallel.share import Share
from moe_engine.parallel.topology import Topology
from moe_engine.planning.model.quantization import with_quantization
from tests.models import stepper
from tests.models.checkpoints import make_checkpoint
from tests.models.conftest import reference_logits
from tests.models.mxfp4 import mxfp4_copy
from tests.models.parameters import num_active_parameters
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_parity import assert_close

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128,
    "attention_bias": True, "swiglu_limit": 7.0, "vocab_size": 201088, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 150000, "eos_token_id": 200002, "initial_context_length": 4096,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gpt_oss")
    return mxfp4_copy(make_checkpoint("gpt_oss", folder / "own", tokenizer=False), folder)


def test_the_flag_may_name_the_format(copies: tuple[Path, Path]) -> None:
    config = load_model_config(copies[0])
    assert with_quantization(config, EngineArgs.from_kwargs(quantization="mxfp4")) is config


@pytest.mark.parametrize("row", all_rows())
def test_mxfp4_equals_what_transformers_decodes(copies: tuple[Path, Path], row: str) -> None:
    stored, plain = copies
    tokens, want = reference_logits(plain, 0)
    model = stepper.load(stored, row)
    got = [model.step([Chunk(0, tokens[:70], False)])[0], model.step([Chunk(0, tokens[70:], True)])[0]]
    assert_close(torch.cat(got), want)


def test_headers_and_slices(copies: tuple[Path, Path]) -> None:
    for path in copies:
        config = load_model_config(path)
        check_headers(path, read_checkpoint(path), config)
        reader = WeightReader(path, torch.float32, format=config.weight_format)
        for name, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
            prefix = f"model.layers.1.mlp.experts.5.{name}"
            whole = reader.linear(prefix, shape)
            for cut in (Cut(slice(8, 24)), Cut(cols=slice(16, 32)), Cut(slice(0, 8), slice(8, 24))):
                assert torch.equal(reader.linear(prefix, shape, cut), cut.of(whole))
    stored = copies[0]
    config = json.loads((stored / "config.json").read_text()) | {"num_local_experts": 4}
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"experts.gate_up_proj_blocks .*\[8, 64, 2, 16\], not \[4, 64, 2, 16\]"):
        check_headers(stored, read_checkpoint(stored), load_model_config(stored))
    (stored / "config.json").write_text(json.dumps(config | {"num_local_experts": 8}))


def test_experts_stay_in_four_bits_on_a_gpu(tmp_path: Path) -> None:
    """The row, also where a library would multiply them dequantized; the format in the ledger."""
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    config = load_model_config(tmp_path)
    need = need_of_model(config, "bfloat16")
    plan = plan_kernels(Device("cuda", "H100", (9, 0), compiler="c++"), need)
    assert plan.row("experts").name == "triton" and families(plan.multiplied, FOUR_BITS) == FAMILIES
    triton, library = (next(row for row in tables.EXPERTS if row.name == name) for name in ("triton", "deep_gemm"))
    assert triton.score(plan.device, need) > library.score(plan.device, need)
    formats = [config.weight_format.held_by(multiplied) for multiplied in ({}, plan.multiplied)]
    for ranks, width in ((1, 2880), (2, 1440), (4, 736)):  # of four ranks, 90 groups of 32: 23, 22, 23 and 22
        dense, kept = (sizes.weight_bytes(config, 2, topology=Topology(ranks), format=format) for format in formats)
        experts = 24 * 32 * 3 * 2880 * width
        assert dense - kept == experts * 2 - experts * 17 // 32


def test_parts_of_whole_groups() -> None:
    for ranks, count in product(range(1, 9), range(1, 40)):
        if (total := 32 * count) % ranks == 0:
            cuts = [Share(rank, ranks).cut_in_groups(total, 32) or slice(0, total) for rank in range(ranks)]
            widths = [cut.stop - cut.start for cut in cuts]
            assert [cut.start for cut in cuts] == [sum(widths[:rank]) for rank in range(ranks)] and sum(widths) == total
            assert max(widths) == widths[0] and (count < ranks or not any(width % 32 for width in widths))
            assert max(widths) - min(widths) <= 32


def test_published_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    config = load_model_config(tmp_path)
    assert sizes.num_parameters(config) == pytest.approx(20.9e9, rel=2e-3)
    assert num_active_parameters(config) == pytest.approx(3.6e9, rel=2e-2)
    assert config.windows[:3] == (128, None, 128) and config.rope.attention_factor == pytest.approx(1.34657, rel=1e-5)
    assert not config.rope.truncate and config.rope.softmax_factor == 1.0
    assert [group.window for group in config.cache_groups] == [None, 128]


def test_the_ledger_counts_what_is_held(tmp_path: Path) -> None:
    path = make_checkpoint("gpt_oss", tmp_path, tokenizer=False)
    model = stepper.load(path).model
    assert model.weight_bytes == pytest.approx(sizes.weight_bytes(load_model_config(path), 4), rel=0.005)  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes", "compressed-tensors", "gptq"])
def test_other_formats_are_refused_by_name(tmp_path: Path, method: str) -> None:
    path = make_checkpoint("gpt_oss", tmp_path, tokenizer=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ConfigError, match=f"quant_method '{method}' is not served for gpt-oss; use its MXFP4"):
        load_model_config(path)


def test_libraries_without_sinks_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    need = need_of_model(load_model_config(tmp_path), "bfloat16")
    device = Device("cuda", "H100", (9, 0), compiler="c++")
    with pytest.raises(ValueError, match=r"flashinfer.*no attention sinks"):
        select("attention", tables.GQA, "flashinfer", device, need)
    with pytest.raises(ValueError, match=r"deep_gemm.*no biases of experts"):
        select("experts", tables.EXPERTS, "deep_gemm", device, need)
    with pytest.raises(ConfigError, match="layer_types"):
        (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B | {"layer_types": ["chunked_attention"] * 24}))
        load_model_config(tmp_path)
