"""Runs the vision tower on the images of a step, and keeps its results up to a limit.

Legend: n image tokens of the step, N tokens of an image.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from moe_engine.image_tokens import ImageTokens
from moe_engine.models.batch import ImageRows
from moe_engine.models.image_text import ImageInputs
from moe_engine.worker.batch.row_images import StepImages
from moe_engine.worker.device_stream import DeviceStream


class ImageEncoder:
    """Results by the image's key; the least recently used are dropped.

    Args:
        max_bytes: limit of the results kept between steps; results of the current step may exceed it.
    """

    def __init__(self, model: ImageInputs, max_bytes: int, stream: DeviceStream) -> None:
        self._model, self._max_bytes, self._stream = model, max_bytes, stream
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()  # [N, VisionConfig.row_width] each
        self.num_bytes = 0
        self.num_encoded = 0
        """Images encoded so far."""

    def rows(self, step: StepImages) -> ImageRows:
        """The model's input rows for the image tokens of a step. Images are encoded one by one, so that the peak memory
        is that of the largest image."""
        upload = self._stream.upload
        rows = [self._encoded(image).index_select(0, upload(torch.from_numpy(own))) for image, own in step.parts]
        self._drop_oldest()
        return ImageRows(upload(torch.from_numpy(step.tokens)), torch.cat(rows), upload(torch.from_numpy(step.axes)))

    def warm_up(self) -> None:
        """Runs the tower once, so that its kernels are compiled before the first image."""
        vision = self._model.config.vision
        assert vision is not None
        side = 4 * vision.merge
        pixels = torch.zeros(side * side, vision.patch_width, device=self._stream.device)
        with torch.inference_mode():
            self._model.encode(pixels, (1, side, side))

    def forget(self) -> None:
        """Drops all results: the weights have changed."""
        self._known.clear()
        self.num_bytes = 0

    def _encoded(self, image: ImageTokens) -> Tensor:
        known = self._known.get(image.key)
        if known is not None:
            self._known.move_to_end(image.key)
            return known
        if not image.pixels:
            raise ValueError("an image token is computed whose image came without pixels")
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.float32)
        patches = image.grid[0] * image.grid[1] * image.grid[2]
        rows = self._model.encode(self._stream.upload(pixels.view(patches, -1)), image.grid)
        self._known[image.key] = rows
        self.num_bytes += rows.nbytes
        self.num_encoded += 1
        return rows

    def _drop_oldest(self) -> None:
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._known.popitem(last=False)[1].nbytes
