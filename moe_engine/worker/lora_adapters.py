"""Loaded LoRA adapters of a rank: their weights on the host, and the slots that the steps read.

The frontend loads and unloads adapters by number on all ranks; the scheduler chooses the adapter of each slot
(`StepPlan.lora_loads`). All methods run on the worker's thread, between steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from moe_engine.errors import ConfigError, MoeEngineError
from moe_engine.kernels.device import probe_or_absent
from moe_engine.kernels.lora.choice import build_lora
from moe_engine.kernels.lora.protocol import AdapterTokens
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.lora import LoraLayers
from moe_engine.models.lora_adapter import Adapter, AdapterModule, read_adapter
from moe_engine.types.step_settings import LoraSettings
from moe_engine.worker.device_stream import DeviceStream

logger = logging.getLogger(__name__)

Weights = list[tuple[AdapterModule, Tensor, Tensor]]


class AdapterArgs(msgspec.Struct, forbid_unknown_fields=True):
    """`path`: a local folder on every node."""

    lora_id: int
    path: str


class AdapterId(msgspec.Struct, forbid_unknown_fields=True):
    lora_id: int


class LoraAdapters:
    """Adapters of one rank.

    Raises:
        ConfigError, CheckpointError: an adapter of the launch cannot be read or does not fit.
    """

    def __init__(self, model: Decoder, config: ModelConfig, settings: LoraSettings, stream: DeviceStream) -> None:
        self._config, self._settings, self._stream = config, settings, stream
        like = model.embedding.weight
        self._dtype = like.dtype
        kind = stream.device.type
        try:
            kernel = build_lora(probe_or_absent(kind), str(like.dtype).removeprefix("torch."), settings.backend)
        except ValueError as error:
            raise ConfigError(f"--lora-backend {settings.backend}: {error}") from None
        self._layers = LoraLayers.attach(model, kernel, settings.targets, settings.rank, settings.num_slots)
        self._loaded: dict[int, Weights] = {}
        for adapter in settings.adapters:
            self.load(AdapterArgs(adapter.id, adapter.path))
        if stream.asynchronous:
            self._layers.warm_up(kernel, AdapterTokens.of(np.zeros(1), stream.upload))

    @property
    def num_bytes(self) -> int:
        """Memory of the slots."""
        return self._layers.num_bytes

    def load(self, args: AdapterArgs) -> None:
        """Reads an adapter's weights to the host.

        Raises:
            CheckpointError, ConfigError: it cannot be read, or does not fit the model or the slots.
        """
        adapter = read_adapter(args.path, self._config)
        check_fits(adapter, self._settings)
        with torch.no_grad():
            self._loaded[args.lora_id] = self._layers.read(adapter, self._dtype)

    def unload(self, args: AdapterId) -> None:
        """Drops an adapter's weights. Its slot, if it has one, keeps them until another adapter takes it."""
        self._loaded.pop(args.lora_id, None)

    def fill_slots(self, loads: Sequence[tuple[int, int]]) -> None:
        """Puts adapters into slots, as (slot, adapter)."""
        for slot, lora_id in loads:
            weights = self._loaded.get(lora_id)
            if weights is None:  # its last request was aborted before its slot was filled: its results are not read
                logger.warning("adapter %d was unloaded before its slot was filled", lora_id)
            self._layers.store(slot, weights or [])


def check_fits(adapter: Adapter, settings: LoraSettings) -> None:
    """
    Raises:
        MoeEngineError: the adapter's rank or modules exceed those that the launch has slots for.
    """
    if adapter.rank > settings.rank:
        raise MoeEngineError(
            f"{adapter.path}: rank {adapter.rank} exceeds the {settings.rank} of this launch; start it with "
            f"--max-lora-rank {adapter.rank}"
        )
    if missing := sorted(adapter.targets.difference(settings.targets)):
        raise MoeEngineError(
            f"{adapter.path}: adapts {', '.join(missing)}, and this launch has slots for "
            f"{', '.join(settings.targets)}; start it with --lora-target-modules "
            f"{' '.join([*settings.targets, *missing])}"
        )
