"""Runs the vision tower on the images of a step, and keeps its results up to a limit.

Legend: n image tokens of the step, N tokens of an image.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_engine.models.batch import ImageRows
from moe_engine.models.families.image_text import ImageInputs
from moe_engine.parallel.collectives import Group
from moe_engine.types.image_tokens import ImageTokens
from moe_engine.worker.batch.row_images import StepImages
from moe_engine.worker.device_stream import DeviceStream


class ImageEncoder:
    """Results by the image's key; the least recently used are dropped.

    Args:
        max_bytes: limit of the results kept between steps; results of the current step may exceed it.
        group: ranks with the same images, which divide them among themselves (--mm-enable-dp-encoder); None: every
            rank encodes all.
    """

    def __init__(self, model: ImageInputs, max_bytes: int, stream: DeviceStream, group: Group | None = None) -> None:
        self._model, self._max_bytes, self._stream = model, max_bytes, stream
        self._group = group
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()  # [N, VisionConfig.row_width] each
        self.num_bytes = 0

    def rows(self, step: StepImages, before: int = 0, keep: bool = False) -> ImageRows:
        """The model's input rows for the image tokens of a step (`before` as in `ImageRows`). Images are encoded one by
        one, so that the peak memory is that of the largest image. `keep`: a draft extend follows, which reads the
        results again and then calls `drop_oldest`."""
        put = self._stream.from_array
        if self._group is not None:
            self._encode_together(self._group, {image.key: image for image, _ in step.parts})
        rows = [self._encoded(image).index_select(0, put(own)) for image, own in step.parts]
        if not keep:
            self.drop_oldest()
        return replace(self.positions(step), rows=torch.cat(rows), before=before)

    def positions(self, step: StepImages) -> ImageRows:
        """Tokens and positions of `rows`, with an empty table."""
        tokens, axes = (self._stream.from_array(part) for part in (step.tokens, step.axes))
        vision = self._model.config.vision
        spans: list[tuple[list[int], int]] = []
        if vision is not None and vision.sees_whole:
            first = 0
            for image, own in step.parts:
                spans.append((step.tokens[first : first + len(own)].tolist(), image.stop))
                first += len(own)
        return ImageRows(tokens, self._model.embedding.weight[:0], axes, spans=spans)

    def has(self, image: ImageTokens) -> bool:
        """Whether the rows of an image are known, or can be computed."""
        return bool(image.pixels) or image.key in self._known

    def warm_up(self) -> None:
        """Runs the tower once, so that its kernels are compiled before the first image."""
        vision = self._model.config.vision
        assert vision is not None
        side = vision.tile or vision.side or 4 * vision.merge
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
        return self._keep(image, self._encode(image))

    def _encode(self, image: ImageTokens) -> Tensor:
        if not image.pixels:
            raise ValueError("an image token is computed whose image came without pixels")
        vision = self._model.config.vision
        assert vision is not None
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.float32)
        return self._model.encode(self._stream.upload(pixels.view(-1, vision.patch_width)), image.grid)

    def _keep(self, image: ImageTokens, rows: Tensor) -> Tensor:
        self._known[image.key] = rows
        self.num_bytes += rows.nbytes
        return rows

    def _encode_together(self, group: Group, images: Mapping[bytes, ImageTokens]) -> None:
        """Each rank encodes its part of the unknown images; the sum over ranks of tables that are 0 elsewhere has the
        rows of all. Ranks have the same images, because they run the same steps."""
        unknown = [image for key, image in images.items() if key not in self._known]
        if len(unknown) < 2:
            return  # one image: its rows cost less than their way from another rank
        vision = self._model.config.vision
        assert vision is not None
        counts = [vision.num_tokens(image.grid) for image in unknown]
        dtype = self._model.embedding.weight.dtype
        table = torch.zeros(sum(counts), vision.row_width, dtype=dtype, device=self._stream.device)
        parts = table.split(counts)
        for image, part, owner in zip(unknown, parts, divide([len(image.pixels) for image in unknown], group.size)):
            if owner == group.rank:
                part.copy_(self._encode(image))
        for image, part in zip(unknown, group.all_reduce(table).split(counts)):
            self._keep(image, part.clone())

    def drop_oldest(self) -> None:
        """Drops results beyond the limit."""
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._known.popitem(last=False)[1].nbytes


def divide(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each image: the largest first, each to the rank with the least so far."""
    loads, owners = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(ranks), key=lambda rank: loads[rank])
        loads[owners[i]] += sizes[i]
    return owners
