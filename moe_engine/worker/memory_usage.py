"""Memory that a rank holds, by purpose, for comparison with the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import psutil
import torch

from moe_engine.models.footprint import weights_of
from moe_engine.models.layers.decoder import Decoder
from moe_engine.worker.memory_release import distinct
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.weight_parts import parts_of


def memory_usage(runner: ModelRunner) -> dict[str, int]:
    """Bytes of storages that exist: ``weights`` (drafts and the rotary table included), ``kv_cache`` and
    ``request_states``; and of the whole process: ``process`` (resident), ``device`` (allocated by torch on an
    accelerator; 0 on a CPU).

    Raises:
        MoeEngineError: an external model.
        TypeError: a kernel keeps its weights in a form that is not tensors.
    """
    states, device = runner.rows.states, runner.stream.device
    parts = parts_of(runner, exported=True)
    decoders = (part for part in parts if isinstance(part, Decoder))
    tables = (table.cos_sin for part in decoders for table in part.rotary_tables.values())
    return {
        "weights": _bytes(chain(tables, *map(weights_of, parts))),
        "kv_cache": _bytes(runner.kv_pool.tensors()),
        "request_states": 0 if states is None else _bytes(states.tensors()),
        "process": psutil.Process().memory_info().rss,
        "device": torch.accelerator.memory_allocated(device) if runner.stream.asynchronous else 0,
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(storage.nbytes() for storage in distinct(tensors))
