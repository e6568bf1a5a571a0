"""Models with an indexer (DeepSeek sparse attention, MiniMax-M3's blocks): the flags that they exclude, before a weight
is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.kernels.kv_format.formats import E4M3, E5M2
from moe_engine.models.config import GQAConfig, MLAConfig, ModelConfig
from moe_engine.planning.resolution_log import Record


def has_indexer(model: ModelConfig) -> bool:
    return isinstance(model.attention, MLAConfig | GQAConfig) and model.attention.indexer is not None


def has_blocks(model: ModelConfig) -> bool:
    """True for block-sparse attention."""
    return isinstance(model.attention, GQAConfig) and model.attention.blocks is not None


FP8_KEYS = frozenset({("cuda", "bfloat16"), ("cuda", "float16")})
"""Devices and activation types with which ``--kv-cache-dtype auto`` keeps index keys in FP8, as DeepSeek's and SGLang's
code does."""


def with_index_keys(args: EngineArgs, model: ModelConfig, device: str, dtype: str, record: Record) -> ModelConfig:
    """The model with the type of its cached index keys, with latents in `dtype`."""
    attention = model.attention
    if not isinstance(attention, MLAConfig) or attention.indexer is None or attention.pool > 1:
        return model
    if args.memory.kv_cache_dtype != "auto" or (device, dtype) not in FP8_KEYS:
        return model
    record.remark(f"index keys are cached in FP8, latents in {dtype}; --kv-cache-dtype {dtype} keeps both in {dtype}")
    if (key := "with FP8 index keys") not in model.known_sizes:  # one for all launches of a plan, with its known sizes
        indexer = replace(attention.indexer, fp8_keys=True)
        model.known_sizes[key] = replace(model, attention=replace(attention, indexer=indexer))
    found: ModelConfig = model.known_sizes[key]
    return found


def check_sparse(args: EngineArgs, models: Sequence[ModelConfig], device: str, topk: int) -> None:
    """Refuses what sparse attention does not support.

    Args:
        models: the model, and its draft model.
        topk: branches of a draft tree at each node; 1: drafts are chains.

    Raises:
        ConfigError: with the flag and what works instead.
    """
    sparse = next((model for model in models if has_indexer(model) or has_blocks(model)), None)
    if sparse is None:
        return
    if args.memory.kv_cache_dtype == E5M2 and has_indexer(sparse):
        raise ConfigError(
            f"--kv-cache-dtype {E5M2}: index keys ({sparse.source} has an indexer) need a scale; use {E4M3}, or auto"
        )
    if topk > 1 and has_blocks(sparse):
        raise NotAvailableYet(
            f"--speculative-eagle-topk {topk}: not available yet: a draft tree's tokens have no blocks of their own; "
            f"use 1 ({sparse.source} has block-sparse attention)"
        )
    for complaint in _not_yet(args, device, topk):
        raise NotAvailableYet(f"{complaint} ({sparse.source} has sparse attention)")


def _not_yet(args: EngineArgs, device: str, topk: int) -> Iterator[str]:
    if args.backends.enable_torch_compile:
        yield "--enable-torch-compile: not available yet: only layers with dense attention are compiled; leave it out"
    if topk > 1 and device != "cpu":
        yield (
            f"--speculative-eagle-topk {topk} on {device}: not available yet: the tokens that a node of a draft tree "
            "sees are counted on the device; use 1"
        )
