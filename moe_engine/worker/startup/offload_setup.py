"""Weights that wait in host memory (``--cpu-offload-gb``): checks and log line after the model is loaded."""

from __future__ import annotations

import logging

from moe_engine.errors import ConfigError
from moe_engine.kernels.weight_stream import WeightStream
from moe_engine.models.batch import Model
from moe_engine.models.layers.decoder import Decoder

logger = logging.getLogger("moe_engine")

GB = 1 << 30
NOT_REPLACED = (
    "with --cpu-offload-gb the weights of several layers take turns in the same device memory: they cannot be read, "
    "replaced or released; start without the flag"
)


def note_offload(stream: WeightStream, model: Model) -> None:
    """Logs the memory of the streamed layers. Raises ConfigError: an external model, which has no such layers."""
    if not isinstance(model, Decoder):
        raise ConfigError(f"--cpu-offload-gb: {type(model).__name__} is an external model; leave it out")
    logger.info(
        "CPU offload: %.2f GB of weights of %d layers in host memory, %.2f GB of device buffers.",
        stream.host_bytes / GB, len(stream.layers), stream.buffer_bytes / GB,
    )  # fmt: skip
