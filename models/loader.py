"""Weight loading: from a checkpoint directory to a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.kernels.backends import Backends
from moe_engine.models import registry
from moe_engine.models.activation_dtype import activation_dtype
from moe_engine.models.batch import Model
from moe_engine.models.checkpoint_files import read_checkpoint, read_head, read_nextn
from moe_engine.models.config import ModelConfig
from moe_engine.models.drafts.block_head import BlockHead
from moe_engine.models.drafts.draft_vocabulary import draft_ids, mapped_head
from moe_engine.models.drafts.eagle import EagleHead
from moe_engine.models.drafts.mtp import MTPLayers
from moe_engine.models.drafts.stream_block import StreamBlock
from moe_engine.models.dummy_weights import DummyReader
from moe_engine.models.eagle_config import HeadConfig, names_outside_head
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.models.read_ahead import Prefetch
from moe_engine.models.tensors.model import names_outside_model, names_outside_mtp
from moe_engine.models.weights import ReadFiles, WeightReader, WeightSource
from moe_engine.models.widths import widths_of
from moe_engine.parallel.context import SINGLE, ParallelContext

FILE_FORMATS = ("auto", "safetensors", "pt", "layered", "gguf")
"""Values of ``--load-format`` that read files. Every load takes one layer at a time, as with ``layered``."""


OwnDrafts = MTPLayers | StreamBlock
"""Draft layers of a model's checkpoint."""


@dataclass(frozen=True)
class LoadOptions:
    """How weights are read.

    Args:
        dtype: name of the dtype of activations and weights; ``auto`` follows the checkpoint.
        load_format: ``dummy`` uses random weights from `seed`, others read the files.
        progress: a bar on stderr.
        prefetch: threads that read the files into the page cache ahead of the loader; None: one thread of a single rank
            does.
        drop_cache: remove the files from the page cache at the end.
        finite: refuse tensors with values that are NaN or infinite.
    """

    dtype: str = "auto"
    device: torch.device | str = "cpu"
    load_format: str = "auto"
    seed: int = 0
    progress: bool = False
    prefetch: Prefetch | None = None
    drop_cache: bool = False
    finite: bool = False


def load_model(
    path: str | Path,
    config: ModelConfig,
    options: LoadOptions,
    backends: Backends,
    parallel: ParallelContext = SINGLE,
    **model_options: Any,
) -> Model:
    """Builds the config's model and loads its weights, with little peak memory beyond the weights themselves.

    Args:
        parallel: this rank's context; the rank loads its own part. Its dispatcher must be set with all-to-all.
        model_options: keywords of the model class (``max_positions``, DeepSeek's ``max_expanded_tokens``).

    Raises:
        CheckpointError: with file and tensor. ConfigError: for a bad dtype or load format, or a model that cannot be
            sharded by `parallel`.
    """
    parallel.topology.check(widths_of(config, parallel.redundant_experts))
    if parallel.topology.travels and parallel.dispatcher is None and config.is_moe:
        raise ValueError(f"--moe-a2a-backend {parallel.topology.moe_a2a_backend}: call with_dispatcher first")
    target = registry.find([config.architecture], config.model_type, config.source).model_class()
    with _reading(path, config, options, partial(names_outside_model, config), parallel) as reader:
        model: Model = target(config, reader, backends, parallel, **model_options)
    return model


def load_mtp(
    path: str | Path, config: ModelConfig, model: Model, options: LoadOptions, exported: bool = False
) -> OwnDrafts:
    """The MTP layers, or layers that fill in blocks, of a loaded `model`, with its kernels, embedding and head.

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
    read = partial(read_nextn, layer=config.num_layers) if exported else None
    with _reading(path, config, options, partial(names_outside_mtp, config), model.parallel, read) as reader:
        return MTPLayers(model, reader) if config.own_block is None else StreamBlock(model, reader)


def load_head(
    head: HeadConfig,
    model: Model,
    target: tuple[str | Path, ModelConfig],
    options: LoadOptions,
    backends: Backends,
    max_positions: int,
) -> EagleHead | BlockHead:
    """A draft head for a loaded `model`.

    Args:
        target: directory and config of the model, whose LM head a token map reads again.

    Raises:
        CheckpointError: with file and tensor. ConfigError: an external model.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(f"{head.path}: draft heads for external models ({type(model).__name__}) are not supported")
    outside = partial(names_outside_head, head)
    with _reading(head.path, head.layer, options, outside, model.parallel, read_head) as reader:
        ids, lm_head = draft_ids(head, reader), None
        if head.block is not None:
            return BlockHead(head, model, reader, backends, max_positions, ids)
        if head.num_mapped and ids is not None:
            path, config = target
            source = open_weights(path, config, replace(options, progress=False, prefetch=None, drop_cache=False))
            lm_head = mapped_head(config, source, backends.linear, model.embedding, model.parallel, ids)
        return EagleHead(head, model, reader, backends, max_positions, ids, lm_head)


def reload(
    part: Decoder | OwnDrafts, path: str | Path, config: ModelConfig, options: LoadOptions
) -> Iterator[tuple[Any, Any]]:
    """Pairs of a module of a loaded model, or of its MTP layers, and the same module with the weights of another
    checkpoint, read one after the other: the caller may drop each pair before the next.

    Raises:
        CheckpointError: as `load_model`.
    """
    outside = names_outside_model if isinstance(part, Decoder) else names_outside_mtp
    with torch.no_grad():
        reader = open_weights(path, config, options, partial(outside, config))
        reader.served_gates = gates_of([part])
        for module in part.modules():
            yield module.module, module.build(reader)
        reader.finish()


def gates_of(parts: Iterable[Decoder | OwnDrafts]) -> torch.dtype | None:
    """The dtype of the routers' weights in memory; None without routers."""
    modules = (module.module for part in parts for module in part.modules())
    return next((module.gate_dtype for module in modules if isinstance(module, MoE)), None)


def open_weights(
    path: str | Path,
    config: ModelConfig,
    options: LoadOptions,
    ignore: Callable[[Collection[str]], Collection[str]] = set,
    read: ReadFiles | None = None,
) -> WeightSource:
    """The weights of a checkpoint.

    Args:
        ignore: see `WeightReader`; default: all tensors may stay unread.
        read: default: `read_checkpoint`.

    Raises:
        CheckpointError: an unknown load format.
    """
    device = torch.device(options.device)
    dtype = getattr(torch, activation_dtype(config, options.dtype, device.type))
    if options.load_format == "dummy":
        return DummyReader(dtype, device, options.seed, config.weight_format)
    if options.load_format not in FILE_FORMATS:
        raise CheckpointError(f"--load-format {options.load_format}: use {', '.join(FILE_FORMATS)} or dummy")
    return WeightReader(
        path, dtype, device, config.weight_format, ignore, options.progress,
        read or partial(read_checkpoint, load_format=options.load_format), prefetch=options.prefetch,
        drop=options.drop_cache, finite=options.finite,
    )  # fmt: skip


@contextmanager
def _reading(
    path: str | Path,
    config: ModelConfig,
    options: LoadOptions,
    ignore: Callable[[Collection[str]], Collection[str]],
    parallel: ParallelContext,
    read: ReadFiles | None = None,
) -> Iterator[WeightSource]:
    """`open_weights` without gradients: finished at the end, abandoned after an error. A single rank, which reads all
    files, reads them ahead."""
    if options.prefetch is None and parallel.world_size == 1:
        options = replace(options, prefetch=Prefetch())
    with torch.no_grad():
        reader = open_weights(path, config, options, ignore, read)
        try:
            yield reader
        except BaseException:
            if isinstance(reader, WeightReader):
                reader.abandon()
            raise
        reader.finish()
