"""The cache tensors that each model family declares (keys and values, latents, index keys, drafts' layers, eight bits)
keep every bit in the host tier and the storage tier: device, host, file, and the host and device of another engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_engine.kernels.kv_format.formats import STORED
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_pool import KVPool, kv_spec
from tests.engine.test_storage_tier import round_trip
from tests.models import ling_v2_5
from tests.models.checkpoints import _FAMILY, BLOCK_SPARSE, KINDS, LARGE4, SPARSE_KINDS, hub_fields

FORMATS = ("bfloat16", "fp8_e4m3", "fp8_e5m2")


def config_of(kind: str, folder: Path) -> ModelConfig:
    """The config of the family's tiny checkpoint; no weights are written."""
    if kind == "ling_v2_5":
        fields = ling_v2_5.FIELDS
    else:
        fields = hub_fields(kind) | {"architectures": [f"{_FAMILY[kind][0]}ForCausalLM"], "model_type": kind}
    if kind == BLOCK_SPARSE:  # the text model of its architecture
        fields["architectures"] = ["MiniMaxM3SparseForCausalLM"]
    if kind == "step3p7":
        fields["architectures"] = ["Step3p5ForCausalLM"]
    if kind == LARGE4:  # a layer without latents of its own
        fields |= {"architectures": ["MistralLarge4ForConditionalGeneration"], "kv_source_layers": [0, 1, 0, 3]}
    if kind == "llama4":
        fields["model_type"] = "llama4_text"
    if kind == "deepseek_v2_lite":
        fields["model_type"] = "deepseek_v2"
    (folder / "config.json").write_text(json.dumps(fields))
    return load_model_config(folder)


MORE = ("gemma4", "granitemoehybrid", "llama4", "phimoe", "ling_v2_5")


@pytest.mark.parametrize("kind", [*KINDS, *SPARSE_KINDS, BLOCK_SPARSE, *MORE])
def test_every_tensor_of_every_family_comes_back(kind: str, tmp_path: Path) -> None:
    config = config_of(kind, tmp_path)
    assert set(FORMATS) <= STORED.keys()
    for number, kv_dtype in enumerate(FORMATS):
        mtp = number % 2  # a draft layer after the model's layers
        spec = kv_spec(config, kv_dtype, mtp)
        pool = KVPool(spec, 24, 4, DeviceStream("cpu"))
        layers = len(config.kv_layers) + mtp
        assert len({line.split(".")[0] for line in pool.schema()}) == layers
        assert sum(pool.row_widths) == spec.bytes_per_token
        folder = tmp_path / kv_dtype
        round_trip(pool, folder, ("page_first", "layer_first") if mtp else ("layer_first", "page_first"))


def test_families_declare_different_tensors(tmp_path: Path) -> None:
    """The cases above have one tensor per layer, keys and values, a latent with an index key in some layers."""
    schemas = {}
    for kind in ("deepseek_v3", "qwen3", "deepseek_v32"):
        pool = KVPool(kv_spec(config_of(kind, tmp_path), "bfloat16"), 4, 4, DeviceStream("cpu"))
        schemas[kind] = [len(pool.layers[0])] if isinstance(pool.layers[0], tuple) else [1]
        schemas[kind].append(len(set(pool.row_widths)))
    assert schemas == {"deepseek_v3": [1, 1], "qwen3": [2, 1], "deepseek_v32": [2, 2]}
