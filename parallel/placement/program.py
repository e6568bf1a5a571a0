"""The moves to a new placement as one integer array: planned on one rank, broadcast to all.

    header [number of changed layers]; for each: [layer, number of chunks]; for each chunk: [number of copies];
    for each copy: [expert, source slot, destination slot]

Legend: L layers, P slots.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from moe_engine.parallel.placement.moves import Chunk, Copy
from moe_engine.parallel.placement.placement import ExpertPlacement


def encode_moves(chunks: Iterable[Chunk]) -> NDArray[np.int64]:
    """Encodes chunks from `plan_moves` between complete placements: every copy has a source.

    Raises:
        ValueError: an expert has no source.
    """
    by_layer: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_layer.setdefault(chunk.layer, []).append(chunk)
    out = [len(by_layer)]
    for layer, of_layer in by_layer.items():
        out += [layer, len(of_layer)]
        for chunk in of_layer:
            out.append(len(chunk.copies))
            for copy in chunk.copies:
                if copy.source is None:
                    raise ValueError(f"layer {layer}: no rank holds expert {copy.expert}")
                out += [copy.expert, copy.source, copy.dest]
    return np.array(out, dtype=np.int64)


def decode_moves(program: NDArray[np.int64], placement: ExpertPlacement) -> list[list[Chunk]]:
    """The chunks of each changed layer, in order. `placement`: the placement before the first chunk."""
    values = iter(program.tolist())
    layers = []
    for _ in range(next(values)):
        layer, count = next(values), next(values)
        table = placement.physical_to_logical[layer].tolist()
        chunks = []
        for _ in range(count):
            copies = tuple(Copy(next(values), next(values), next(values)) for _ in range(next(values)))
            for copy in copies:
                table[copy.dest] = copy.expert
            chunks.append(Chunk(layer, copies, tuple(table)))
        layers.append(chunks)
    return layers
