"""From a checkpoint directory to a model with its weights in place."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from moe_engine.errors import NotAvailableYet
from moe_engine.kernels.backends import Backends
from moe_engine.models import registry
from moe_engine.models.batch import Model
from moe_engine.models.config import ModelConfig, activation_dtype
from moe_engine.models.weights import open_source
from moe_engine.parallel.context import SINGLE, ParallelContext

_LAYERS = "model.layers."


def load_model(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype | str,
    device: torch.device | str,
    backends: Backends,
    parallel: ParallelContext = SINGLE,
    load_format: str = "auto",
    progress: bool = False,
    seed: int = 0,
    **model_options: Any,
) -> Model:
    """Builds the config's model and pulls its weights; holds little more than the weights themselves meanwhile.

    Args:
        dtype: of activations and weights; a torch dtype or a name (``auto`` follows the checkpoint).
        load_format: ``auto`` and ``safetensors`` read the directory, ``dummy`` draws random weights from `seed`.
        progress: a bar on stderr.
        model_options: keywords of the model class (``max_positions``, DeepSeek's ``max_expanded_tokens``).

    Raises:
        CheckpointError: naming file and tensor. ConfigError: for a bad dtype or load format.
    """
    if parallel.attn_tp_size > 1 or parallel.ep_size > 1:
        raise NotAvailableYet("--tp-size and --ep-size above 1 are not available yet; use data parallelism or one rank")
    device = torch.device(device)
    if isinstance(dtype, str):
        dtype = getattr(torch, activation_dtype(config, dtype, device.type))
    block = config.quant.block if config.quant is not None else (128, 128)
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    if load_format == "dummy":
        options["seed"] = seed
    else:
        options |= {"block": block, "ignore": ignored_names(config), "progress": progress}
    target = registry.find([config.architecture], config.model_type, config.source).model_class()
    with torch.no_grad():
        reader = open_source(load_format, path, **options)
        model: Model = target(config, reader, backends, parallel, **model_options)
        reader.finish()
    return model


def ignored_names(config: ModelConfig, include_mtp: bool = False) -> Callable[[Collection[str]], set[str]]:
    """Which of a checkpoint's tensors no layer needs to ask for.

    Rotary frequencies; a head that is tied to the embedding; multi-token-prediction layers unless `include_mtp`. Those
    have an index >= num_hidden_layers and an eh_proj; a layer without one is missing from config.json's count.
    """

    def index(name: str) -> int:
        part = name.removeprefix(_LAYERS).partition(".")[0]
        return int(part) if name.startswith(_LAYERS) and part.isdigit() else -1

    def ignore(names: Collection[str]) -> set[str]:
        mtp = {index(name) for name in names if name.endswith(".eh_proj.weight") and index(name) >= config.num_layers}
        return {
            name
            for name in names
            if name.endswith("rotary_emb.inv_freq")
            or (config.tie_word_embeddings and name.startswith("lm_head."))
            or (not include_mtp and index(name) in mtp)
        }

    return ignore
