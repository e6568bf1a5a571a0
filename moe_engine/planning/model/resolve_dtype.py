"""Resolves --dtype, --kv-cache-dtype and the name of the weight format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.kernels.kv_format.formats import E4M3, E4M3_TENSOR, E5M2, is_fp8
from moe_engine.models.activation_dtype import activation_dtype
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.kv_cache_scheme import FP8, kv_cache_scheme
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.resolution_log import Record

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def resolve_dtype(args: EngineArgs, model: ModelConfig, machine: Machine, record: Record) -> str:
    _note_quantization(args, model, record)
    asked = args.model.dtype
    dtype = activation_dtype(model, asked, machine.device.kind)
    if asked != "auto":
        return dtype
    if dtype == "float16" and machine.on_cpu:
        return record.note("dtype", "bfloat16", "the checkpoint is float16, and CPU kernels compute in bfloat16")
    if stored := model.weight_format.name:
        return record.note("dtype", dtype, f"compute type of {stored} weights")
    return record.note("dtype", dtype, f"the checkpoint is {model.checkpoint_dtype}")


def stated_kv_dtype(model: ModelConfig) -> str:
    """What ``--kv-cache-dtype auto`` stands for: the type that the checkpoint states, or ``auto`` without one."""
    return E4M3 if model.streams is None and kv_cache_scheme(model.raw or {}) == FP8 else "auto"


def with_stated_kv_dtype(args: EngineArgs, model: ModelConfig, record: Record) -> EngineArgs:
    """The arguments with the type of the KV cache that the checkpoint states, for ``--kv-cache-dtype auto``."""
    if args.memory.kv_cache_dtype != "auto" or not (scheme := kv_cache_scheme(model.raw or {})):
        return args
    if (dtype := stated_kv_dtype(model)) == "auto":
        record.remark(f"{model.source} states a KV cache in {scheme}, which is not served: activations are cached")
        return args
    record.note("kv_cache_dtype", dtype, f"{model.source} states a KV cache in {scheme}")
    return replace(args, memory=replace(args.memory, kv_cache_dtype=dtype))


def resolve_kv_dtype(args: EngineArgs, dtype: str, record: Record) -> str:
    asked = args.memory.kv_cache_dtype
    if asked == "auto":
        return record.note("kv_cache_dtype", dtype, "that of the activations")
    if asked == RECORDS:
        return E4M3
    if is_fp8(asked):
        if asked == E5M2:
            record.remark(f"--kv-cache-dtype {asked} has two mantissa bits; {E4M3} has three")
        return asked
    if asked != dtype:
        raise ConfigError(
            f"--kv-cache-dtype {asked} with activations in {dtype} (--dtype {args.model.dtype}): attention needs the "
            f"same type for both; drop --kv-cache-dtype, or use --dtype {asked}"
        )
    return asked


RECORDS = "fp8_ds_mla"
"""vLLM's name of MLA's e4m3 rows with scales."""


def kv_forms(
    args: EngineArgs, kv_dtype: str, model: ModelConfig, draft: ModelConfig | None, deterministic: bool
) -> tuple[str, ...]:
    """Formats of the KV cache to choose from by the attention row, the most accurate first.

    Args:
        kv_dtype: the resolved type.
        draft: the draft model or EAGLE head, whose KV has the same type.

    Raises:
        ConfigError: a format that the model does not have.
    """
    asked = args.memory.kv_cache_dtype
    for part in (model, draft):
        if part is None or (isinstance(part.attention, MLAConfig) and not part.attention.index_width):
            continue
        if asked not in (RECORDS, E4M3_TENSOR):
            return (kv_dtype,)
        if isinstance(part.attention, MLAConfig) and asked == RECORDS:
            continue
        what = "has sparse attention" if isinstance(part.attention, MLAConfig) else "has no latent attention (MLA)"
        raise ConfigError(f"--kv-cache-dtype {asked}: {part.source} {what}; use {E4M3}")
    return (E4M3, E4M3_TENSOR) if asked == E4M3 and not deterministic else (kv_dtype,)


def with_latent_scales(
    args: EngineArgs, model: ModelConfig, kv_dtype: str, found: Mapping[int, float], record: Record
) -> ModelConfig:
    """The model with its checkpoint's scales of the latent, which rows in `fp8_per_tensor` are divided by.

    Raises:
        ConfigError: a scale that is not a positive number, or compiled decodes.
    """
    scales = tuple(found.get(layer, 1.0) for layer in range(model.num_layers + model.num_nextn_predict_layers))
    if kv_dtype != E4M3_TENSOR or set(scales) == {1.0}:
        return model
    fix = f"--kv-cache-dtype {RECORDS} computes a scale for each row"
    for layer, scale in enumerate(scales):
        if not 0 < scale < math.inf:
            raise ConfigError(
                f"{model.source}: the KV cache's scale of layer {layer} (k_scale) is not one positive number; {fix}"
            )
    if args.backends.enable_torch_compile:
        raise ConfigError(
            "--enable-torch-compile: layers share compiled code, and the checkpoint has KV cache scales for each "
            f"layer (k_scale); {fix}"
        )
    record.remark(
        f"the scales of the KV cache (k_scale) in {model.source}, {min(scales):.3g} to {max(scales):.3g}, are applied"
    )
    return replace(model, latent_scales=scales)


def _note_quantization(args: EngineArgs, model: ModelConfig, record: Record) -> None:
    asked, found = args.model.quantization or args.model.torchao_config, model.weight_format.name
    if not asked and found:
        record.note("quantization", found, "from config.json")
