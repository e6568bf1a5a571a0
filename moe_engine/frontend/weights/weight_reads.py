"""Reads single weights, by the names of the checkpoint, from the memory of all ranks (`worker.weight_read`)."""

from __future__ import annotations

from typing import Any

from moe_engine.errors import InputError
from moe_engine.frontend.client_api import CallError, EngineClient, GroupAnswers, values_of

READ_SECONDS = 300.0


async def read_weight(client: EngineClient, name: str, truncate_size: int) -> list[Any]:
    """The first rows of a weight, by replica: nested lists of numbers.

    Raises:
        InputError: unknown name, or a weight that cannot be read.
        EngineDeadError: no scheduler is alive.
    """
    args = {"name": name, "truncate_size": truncate_size}
    groups = await client.ask_ranks("read_weight", args, READ_SECONDS)
    replicas: dict[int | None, list[GroupAnswers]] = {}
    for group in groups:
        if group.lost is None:
            replicas.setdefault(group.replica, []).append(group)
    try:
        return [_joined(name, values_of(parts, "get_weights_by_name")) for parts in replicas.values()]
    except CallError as error:
        raise InputError(str(error), field="name") from None


def _joined(name: str, ranks: list[dict[str, Any]]) -> Any:
    import numpy as np  # imported here: it would slow the server's start

    shape = ranks[0]["shape"]
    values = np.full(int(np.prod(shape)), np.nan, dtype=np.float32)
    found = np.zeros(values.shape, dtype=bool)
    for rank in ranks:
        numbers = np.frombuffer(rank["numbers"], dtype=np.int64)
        values[numbers] = np.frombuffer(rank["values"], dtype=np.float32)
        found[numbers] = True
    if not found.all():
        raise CallError(f"{name}: not in the memory of the ranks, as scales of weights that were dequantized at load")
    return values.reshape(shape).tolist()
