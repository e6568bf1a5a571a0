"""Models with residual streams (DeepSeek V4, GLM-5.3-Flash): the flags that they exclude, before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_engine.config.args import EngineArgs
from moe_engine.errors import NotAvailableYet
from moe_engine.kernels.kv_format.formats import is_fp8
from moe_engine.models.config import ModelConfig
from moe_engine.planning.model.resolve_dtype import RECORDS


def check_streams(args: EngineArgs, models: Sequence[ModelConfig], has_head: bool) -> None:
    """Refuses what layers with several residual streams do not support.

    Args:
        models: the model, and its draft model.
        has_head: the draft model is an EAGLE head.

    Raises:
        NotAvailableYet: with the flag and what works instead.
    """
    streams = next((model for model in models if model.streams is not None), None)
    if streams is None:
        return
    for complaint in _not_yet(args, has_head):
        raise NotAvailableYet(f"{complaint} ({streams.source} has several residual streams)")


def _not_yet(args: EngineArgs, has_head: bool) -> Iterator[str]:
    dtype = args.memory.kv_cache_dtype
    if is_fp8(dtype) or dtype == RECORDS:
        yield f"--kv-cache-dtype {dtype}: not available yet: entries and keys are kept as activations; use auto"
    if args.backends.enable_torch_compile:
        yield "--enable-torch-compile: not available yet: layers with several residual streams; leave it out"
    if has_head:
        algorithm = args.speculative.speculative_algorithm
        yield f"--speculative-algorithm {algorithm}: not available yet: EAGLE heads; use NGRAM or STANDALONE"
    if args.lora.enable_lora or args.lora.lora_paths:
        yield "--enable-lora, --lora-paths: not available yet; merge the adapter into the checkpoint"
