"""Weight loading: from a checkpoint directory to a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_engine.errors import ConfigError
from moe_engine.kernels.backends import Backends
from moe_engine.models import registry
from moe_engine.models.batch import Model
from moe_engine.models.checkpoint_files import read_checkpoint, read_head, read_nextn
from moe_engine.models.config import ModelConfig, activation_dtype
from moe_engine.models.draft_vocabulary import draft_ids, mapped_head
from moe_engine.models.eagle import EagleHead
from moe_engine.models.eagle_config import HeadConfig, names_outside_head
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.moe import MoE
from moe_engine.models.mtp import MTPLayers
from moe_engine.models.read_ahead import Prefetch
from moe_engine.models.tensors import names_outside_model, names_outside_mtp
from moe_engine.models.weights import ReadFiles, WeightReader, WeightSource, open_source
from moe_engine.models.widths import widths_of
from moe_engine.parallel.context import SINGLE, ParallelContext

Ignore = Callable[[Collection[str]], set[str]]


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
    prefetch: Prefetch | None = None,
    drop_cache: bool = False,
    **model_options: Any,
) -> Model:
    """Builds the config's model and loads its weights, with little peak memory beyond the weights themselves.

    Args:
        parallel: this rank's context; the rank loads its own part. Its dispatcher must be set with all-to-all.
        dtype: of activations and weights; a torch dtype or a name (``auto`` follows the checkpoint).
        load_format: ``auto`` and ``safetensors`` read the directory, ``dummy`` uses random weights from `seed`.
        progress: a bar on stderr.
        prefetch: threads that read the files into the page cache ahead of the loader; None: one thread of a single rank
            does.
        drop_cache: remove the files from the page cache at the end.
        model_options: keywords of the model class (``max_positions``, DeepSeek's ``max_expanded_tokens``).

    Raises:
        CheckpointError: with file and tensor. ConfigError: for a bad dtype or load format, or a model that cannot be
            sharded by `parallel`.
    """
    parallel.topology.check(widths_of(config, parallel.redundant_experts))
    if parallel.topology.travels and parallel.dispatcher is None and config.is_moe:
        raise ValueError(f"--moe-a2a-backend {parallel.topology.moe_a2a_backend}: call with_dispatcher first")
    target = registry.find([config.architecture], config.model_type, config.source).model_class()
    outside, use = partial(names_outside_model, config), _cache_use(parallel, prefetch, drop_cache)
    with _reading(path, config, dtype, device, load_format, progress, seed, outside, **use) as reader:
        model: Model = target(config, reader, backends, parallel, **model_options)
    return model


def load_mtp(
    path: str | Path,
    config: ModelConfig,
    model: Model,
    dtype: torch.dtype | str,
    device: torch.device | str,
    load_format: str = "auto",
    progress: bool = False,
    seed: int = 0,
    exported: bool = False,
    prefetch: Prefetch | None = None,
    drop_cache: bool = False,
) -> MTPLayers:
    """The MTP layers of a loaded `model`, with its kernels, embedding and head. Arguments as in `load_model`.

    Args:
        exported: `path` has the MTP layer alone (SGLang's NextN checkpoints).

    Raises:
        CheckpointError: with file and tensor. ConfigError: config.json has no MTP layers, or the family has none.
    """
    if not config.num_nextn_predict_layers or not isinstance(model, Decoder) or not model.has_mtp:
        raise ConfigError(
            f"{config.source}: {config.architecture} with num_nextn_predict_layers {config.num_nextn_predict_layers} "
            "has no MTP layers for drafting; use a checkpoint with MTP layers, or another --speculative-algorithm"
        )
    outside, use = partial(names_outside_mtp, config), _cache_use(model.parallel, prefetch, drop_cache)
    read = partial(read_nextn, layer=config.num_layers) if exported else read_checkpoint
    with _reading(path, config, dtype, device, load_format, progress, seed, outside, read, **use) as reader:
        return MTPLayers(model, reader)


def load_head(
    head: HeadConfig,
    model: Model,
    target: tuple[str | Path, ModelConfig],
    dtype: torch.dtype | str,
    device: torch.device | str,
    backends: Backends,
    max_positions: int,
    load_format: str = "auto",
    progress: bool = False,
    seed: int = 0,
    prefetch: Prefetch | None = None,
    drop_cache: bool = False,
) -> EagleHead:
    """An EAGLE head for a loaded `model`. Other arguments as in `load_model`.

    Args:
        target: directory and config of the model, whose LM head a token map reads again.

    Raises:
        CheckpointError: with file and tensor. ConfigError: an external model.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(f"{head.path}: EAGLE heads for external models ({type(model).__name__}) are not supported")
    path, config = target
    outside, use = partial(names_outside_head, head), _cache_use(model.parallel, prefetch, drop_cache)
    head_file = head.path, head.layer, dtype, device, load_format, progress, seed, outside, read_head
    with _reading(*head_file, **use) as reader:
        ids, lm_head = draft_ids(head, reader), None
        if head.num_mapped and ids is not None:
            source = _open(path, config, dtype, device, load_format, False, seed, set)
            lm_head = mapped_head(config, source, backends.linear, model.embedding, model.parallel, ids)
        return EagleHead(head, model, reader, backends, max_positions, ids, lm_head)


def reload(
    part: Decoder | MTPLayers,
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype | str,
    device: torch.device | str,
    load_format: str = "auto",
    seed: int = 0,
) -> Iterator[tuple[Any, Any]]:
    """Pairs of a module of a loaded model, or of its MTP layers, and the same module with the weights of another
    checkpoint, read one after the other: the caller may drop each pair before the next. Arguments as in `load_model`.

    Raises:
        CheckpointError: as `load_model`.
    """
    outside = names_outside_mtp if isinstance(part, MTPLayers) else names_outside_model
    with torch.no_grad():
        reader = _open(path, config, dtype, device, load_format, False, seed, partial(outside, config))
        reader.served_gates = gates_of([part])
        for module in part.modules():
            yield module.module, module.build(reader)
        reader.finish()


def gates_of(parts: Iterable[Decoder | MTPLayers]) -> torch.dtype | None:
    """The dtype of the routers' weights in memory; None without routers."""
    modules = (module.module for part in parts for module in part.modules())
    return next((module.gate_dtype for module in modules if isinstance(module, MoE)), None)


def open_again(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype | str,
    device: torch.device | str,
    load_format: str = "auto",
    seed: int = 0,
) -> WeightSource:
    """Reopens the weights of a loaded model, to read some of them again. Arguments as in `load_model`."""
    return _open(path, config, dtype, device, load_format, False, seed, set)


def _cache_use(parallel: ParallelContext, prefetch: Prefetch | None, drop: bool) -> dict[str, Any]:
    """Keywords of `WeightReader`: a single rank, which reads all files, reads them ahead."""
    if prefetch is None and parallel.world_size == 1:
        prefetch = Prefetch()
    return {"prefetch": prefetch, "drop": drop}


@contextmanager
def _reading(*args: Any, **further: Any) -> Iterator[WeightSource]:
    """`_open` without gradients: finished at the end, abandoned after an error."""
    with torch.no_grad():
        reader = _open(*args, **further)
        try:
            yield reader
        except BaseException:
            if isinstance(reader, WeightReader):
                reader.abandon()
            raise
        reader.finish()


def _open(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype | str,
    device: torch.device | str,
    load_format: str,
    progress: bool,
    seed: int,
    ignore: Ignore,
    read: ReadFiles = read_checkpoint,
    **further: Any,
) -> WeightSource:
    """`further`: more keywords of `WeightReader`."""
    device = torch.device(device)
    if isinstance(dtype, str):
        dtype = getattr(torch, activation_dtype(config, dtype, device.type))
    options: dict[str, Any] = {"dtype": dtype, "device": device, "format": config.weight_format}
    if load_format == "dummy":
        options |= {"seed": seed}
    else:
        options |= {"ignore": ignore, "progress": progress, "read": read, **further}
    return open_source(load_format, path, **options)
