"""Chunks of a stream in SGLang's shape."""

from __future__ import annotations

from typing import Any

from moe_engine.frontend.generation import Piece
from moe_engine.frontend.prepare import Job


class Chunks:
    """Makes the chunk of each piece. `incremental`: only the new part of the output."""

    def __init__(self, job: Job, incremental: bool) -> None:
        self._job = job
        self._incremental = incremental
        self._begun: set[int] = set()

    def __call__(self, piece: Piece) -> dict[str, Any]:
        generation = piece.generation
        if self._incremental:
            chunk = generation.output_of(piece, with_prompt=generation.index not in self._begun)
            self._begun.add(generation.index)
        else:
            chunk = generation.output()
        if self._job.is_list:
            chunk["index"] = generation.index
        return chunk
