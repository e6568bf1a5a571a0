"""Images of request rows: positions of several axes, and the image tokens of a step.

Positions after an image are smaller than places in the sequence, by an offset stored for each row.

Legend: T tokens of the step, n image tokens of them, L tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.vision.positions import axis_positions
from moe_engine.types import NewRow
from moe_engine.types.image_tokens import FIRST_KEY, ImageTokens


@dataclass(frozen=True, slots=True)
class StepImages:
    """Image tokens of a step, image by image: `parts` has each image and its tokens in the step, as numbers within the
    image."""

    tokens: np.ndarray  # [n] int64, numbers in the step
    axes: np.ndarray  # [3, n] int64
    parts: list[tuple[ImageTokens, np.ndarray]]


@dataclass(frozen=True, slots=True)
class _Prompt:
    images: tuple[ImageTokens, ...]
    axes: np.ndarray  # [3, L] int64
    image: np.ndarray  # [L] int64: number of the image, -1 for text


class _Found:
    """Collects image tokens of a step."""

    def __init__(self) -> None:
        self._tokens: list[np.ndarray] = []
        self._axes: list[np.ndarray] = []
        self._parts: list[tuple[ImageTokens, np.ndarray]] = []

    def add(
        self,
        prompt: _Prompt,
        tokens: np.ndarray,
        at: np.ndarray,
        wanted: Callable[[ImageTokens], bool] = lambda image: True,
    ) -> None:
        """The image tokens among those at places `at` of a prompt, with the numbers `tokens` in the step."""
        numbers = prompt.image[at]
        for i in np.unique(numbers).tolist():
            if i < 0 or not wanted(prompt.images[i]):
                continue
            own = numbers == i
            self._tokens.append(tokens[own])
            self._axes.append(prompt.axes[:, at[own]])
            self._parts.append((prompt.images[i], at[own] - prompt.images[i].start))

    def images(self) -> StepImages | None:
        if not self._parts:
            return None
        return StepImages(np.concatenate(self._tokens), np.concatenate(self._axes, axis=1), self._parts)


class RowImages:
    """Images of `max_rows` rows. A prompt is kept until its last token is in a step, its positions longer with `keeps`.

    Args:
        has_axes: positions of image tokens have several axes; else they are places in the sequence.
        keeps: drafters build batches of prompt tokens after the model.
        pool: tokens of a pool whose key is rotated by the position of its first token; 1: there are no pools.
    """

    def __init__(self, max_rows: int, vision: VisionConfig, has_axes: bool, keeps: bool = False, pool: int = 1) -> None:
        self._vision, self._keeps, self.pool = vision, keeps, pool
        self.has_axes = has_axes
        self.ends = np.zeros((max_rows, 5), dtype=np.int64)
        """`RowTables.image_ends`."""
        self._shifts, self._lengths, self._last_pools = self.ends[:, 0], self.ends[:, 1], self.ends[:, 2:]
        self._prompts: dict[int, _Prompt] = {}

    def plain(self, ids: np.ndarray) -> np.ndarray:
        """Ids with the placeholder in place of keys (`image_tokens`)."""
        return np.where(ids >= FIRST_KEY, self._vision.image_token, ids)

    def enter(self, new: NewRow) -> NewRow:
        """A new row; returns it with plain token ids."""
        self._prompts.pop(new.row, None)
        self.ends[new.row] = 0
        if not new.images:
            return new
        length, spans = new.num_prompt, [(image.start, image.grid) for image in new.images]
        places = np.arange(length)
        axes, shift = np.broadcast_to(places, (3, length)), 0
        if self.has_axes:
            axes, shift = axis_positions(length, spans, self._vision.merge)
        number = np.full(length, -1, dtype=np.int64)
        for i, image in enumerate(new.images):
            number[image.start : image.stop] = i
        self._shifts[new.row] = shift
        self._lengths[new.row] = length
        self._last_pools[new.row] = axes[:, (length - 1) // self.pool * self.pool]
        self._prompts[new.row] = _Prompt(new.images, axes, number)
        return replace(new, token_ids=self.plain(np.array(new.token_ids)).tolist())

    def shift(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Converts places of tokens after the prompts [..., T] to positions, in place; rows [T]: the row of each."""
        positions += self._shifts[rows]

    def pool_starts(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """`PoolStarts.axes` [T, 3] of tokens at places [T] of rows [T]; before `place`, which may drop a prompt."""
        first = places // self.pool * self.pool
        found = np.repeat(first + self._shifts[rows], 3).reshape(-1, 3)
        inside = first < self._lengths[rows]
        found[inside] = self._last_pools[rows[inside]]
        for row in self._with_prompts(rows[inside]):
            axes = self._prompts[row].axes
            tokens = np.flatnonzero(inside & (rows == row))
            found[tokens] = axes[:, first[tokens]].T
        return found

    def place(
        self, rows: np.ndarray, places: np.ndarray, depths: np.ndarray | None = None
    ) -> tuple[np.ndarray, StepImages | None]:
        """Positions [T] of tokens at places [T] of rows [T], and the image tokens among them, if any. `depths` [T]:
        places in the text, where they differ from those in the row (nodes of draft trees)."""
        positions = (places if depths is None else depths) + self._shifts[rows]
        found = _Found()
        for row in self._with_prompts(rows):
            prompt = self._prompts[row]
            last = len(prompt.image) - 1
            tokens = np.flatnonzero((rows == row) & (places <= last))
            at = places[tokens]
            positions[tokens] = prompt.axes[0, at]
            found.add(prompt, tokens, at)
            if last in at:
                self._end(row, prompt)
        return positions, found.images()

    def find(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        offsets: np.ndarray,
        wanted: Callable[[ImageTokens], bool],
    ) -> StepImages | None:
        """The image tokens among places [starts[i], starts[i] + counts[i]) of rows[i], whose numbers in the step begin
        at offsets[i], of the images that are `wanted`."""
        if not self._prompts:
            return None
        found = _Found()
        for row, start, count, offset in zip(rows.tolist(), starts.tolist(), counts.tolist(), offsets.tolist()):
            prompt = self._prompts.get(row)
            if prompt is not None and start < len(prompt.image):
                at = np.arange(start, min(start + count, len(prompt.image)))
                found.add(prompt, at - start + offset, at, wanted)
        return found.images()

    def _end(self, row: int, prompt: _Prompt) -> None:
        """Drops a prompt whose images are computed; with `keeps` only their pixels."""
        if not self._keeps:
            del self._prompts[row]
        elif any(image.pixels for image in prompt.images):
            self._prompts[row] = replace(prompt, images=tuple(replace(image, pixels=b"") for image in prompt.images))

    def _with_prompts(self, rows: np.ndarray) -> Sequence[int]:
        if not self._prompts:
            return ()
        return [row for row in np.unique(rows).tolist() if row in self._prompts]
