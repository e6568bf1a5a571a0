"""Models with an indexer (DeepSeek sparse attention): the flags that they exclude, before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.kernels.kv_format.formats import E4M3, E5M2
from moe_engine.models.config import MLAConfig, ModelConfig


def has_indexer(model: ModelConfig) -> bool:
    return isinstance(model.attention, MLAConfig) and model.attention.indexer is not None


def check_sparse(args: EngineArgs, models: Sequence[ModelConfig], device: str, topk: int) -> None:
    """Refuses what sparse attention does not support.

    Args:
        models: the model, and its draft model.
        topk: branches of a draft tree at each node; 1: drafts are chains.

    Raises:
        ConfigError: with the flag and what works instead.
    """
    sparse = next(filter(has_indexer, models), None)
    if sparse is None:
        return
    if args.memory.kv_cache_dtype == E5M2:
        raise ConfigError(
            f"--kv-cache-dtype {E5M2}: index keys ({sparse.source} has an indexer) need a scale; use {E4M3}, or auto"
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
