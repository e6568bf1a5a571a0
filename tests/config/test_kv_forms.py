"""The format of an MLA model's e4m3 KV cache: chosen by the attention row, or named by --kv-cache-dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.core.kv_transfer.schema import cache_schema, difference
from moe_engine.errors import ConfigError
from moe_engine.kernels.vendors import probe
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from tests.config.conftest import machine
from tests.config.test_speculation import LLAMA
from tests.models.published import V3

SGL, TRTLLM, FLASHMLA = ("sgl_kernel.flash_mla", "flashinfer"), ("flashinfer",), ("flash_mla",)
"""Installed libraries."""


def launch(folder: Path, major: int, config: dict[str, Any] = V3, **flags: Any) -> ResolvedConfig:
    """A launch on a GPU of that generation."""
    (folder / "config.json").write_text(json.dumps(config))
    gpu = machine(1000, 1000, "cuda", capability=(major, 0))
    return prepare(EngineArgs.from_kwargs(model_path=str(folder), load_format="dummy", **flags), gpu)


@pytest.mark.parametrize(
    ("major", "libraries", "flags", "row", "found"),
    [
        (10, TRTLLM, {}, "trtllm_mla", "fp8_per_tensor"),
        (9, SGL, {}, "flashmla", "fp8_per_tensor"),
        (9, (), {}, "triton", "fp8_e4m3"),
        (9, FLASHMLA, {}, "triton", "fp8_e4m3"),
        (10, TRTLLM, {"attention_backend": "triton"}, "triton", "fp8_e4m3"),
        (10, TRTLLM, {"kv_cache_dtype": "fp8_ds_mla"}, "triton", "fp8_e4m3"),
        (9, (), {"kv_cache_dtype": "fp8_per_tensor"}, "triton", "fp8_per_tensor"),
        (9, SGL, {"enable_deterministic_inference": True}, "triton", "fp8_e4m3"),
    ],
)
def test_the_row_chooses(
    major: int, libraries: tuple[str, ...], flags: dict[str, object], row: str, found: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(probe, "_found", lambda name: name in libraries)
    monkeypatch.setattr("moe_engine.kernels.triton.availability.version", lambda: (3, 9))
    config = launch(tmp_path, major, **{"kv_cache_dtype": "fp8_e4m3"} | flags)
    assert (config.kernels.model.row("attention").name, config.kv_cache_dtype) == (row, found)
    explained = {decision.name: decision.reason for decision in config.decisions}
    assert ("kv_cache_dtype" in explained) == (found == "fp8_per_tensor" and "kv_cache_dtype" not in flags)


def test_models_without_the_format_are_refused(tmp_path: Path) -> None:
    sparse = {**V3, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    sparse |= {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
    for config, asked, why in (
        (LLAMA, "fp8_per_tensor", "no latent attention"), (LLAMA, "fp8_ds_mla", "no latent attention"),
        (sparse, "fp8_per_tensor", "sparse attention"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype {asked}: .* has {why}.*; use fp8_e4m3"):
            launch(tmp_path, 9, config, kv_cache_dtype=asked)
    assert launch(tmp_path, 9, sparse, kv_cache_dtype="fp8_ds_mla").kv_cache_dtype == "fp8_e4m3"
    assert launch(tmp_path, 9, sparse, kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8_e4m3"


def test_servers_of_different_forms_do_not_share_kv(tmp_path: Path) -> None:
    prefill, decode = (
        cache_schema(launch(tmp_path, 9, kv_cache_dtype=name)) for name in ("fp8_per_tensor", "fp8_ds_mla")
    )
    assert difference(prefill, prefill) is None
    decode["cache"] = prefill["cache"]  # named before the widths
    found = difference(prefill, decode)
    assert found == "--kv-cache-dtype: prefill server fp8_per_tensor, decode server fp8_e4m3"


SCHEMES = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    },
    "ModelOpt": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
}  # fmt: skip


@pytest.mark.parametrize("section", SCHEMES.values(), ids=SCHEMES)
def test_auto_is_the_type_that_the_checkpoint_states(section: dict[str, Any], tmp_path: Path) -> None:
    config = launch(tmp_path, 9, LLAMA | {"quantization_config": section})
    assert config.kv_cache_dtype == config.args.memory.kv_cache_dtype == "fp8_e4m3"
    (reason,) = (decision.reason for decision in config.decisions if decision.name == "kv_cache_dtype")
    assert reason.endswith("states a KV cache in FP8")
    assert launch(tmp_path, 9, LLAMA | {"quantization_config": section}, kv_cache_dtype="bf16").kv_cache_dtype == (
        "bfloat16"
    )
    plain = {**section, "kv_cache_scheme": None} if section["quant_method"] == "modelopt" else None
    assert launch(tmp_path, 9, LLAMA | {"quantization_config": plain}).kv_cache_dtype == "bfloat16"


@pytest.mark.parametrize(("weights", "cache"), [("FP8", "FP8"), (None, "FP8"), ("FP8", "NVFP4"), ("FP8", None)])
def test_auto_follows_hf_quant_config(weights: str | None, cache: str | None, tmp_path: Path) -> None:
    quantization = {"quant_algo": weights, "kv_cache_quant_algo": cache, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    config = launch(tmp_path, 9, LLAMA)
    assert config.kv_cache_dtype == ("fp8_e4m3" if cache == "FP8" else "bfloat16")
    assert config.model.weight_format.name == ("modelopt" if weights else "")
    assert any("states a KV cache in NVFP4, which is not served" in note for note in config.notes) == (cache == "NVFP4")
