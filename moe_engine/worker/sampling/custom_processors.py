"""Custom logit processors (`custom_logit_processor`): run last, on the first rank of an attention group, request by
request. The other ranks receive the resulting logits, so that nondeterministic code cannot make the ranks diverge.

A processor that raises ends its own request: its logits become NaN, which yields the invalid token, and the message
goes to the result (`StepResult.errors`).

Legend: S sampled rows, V vocabulary, Q sampled rows of one request.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.custom_logit_processor import CustomLogitProcessor
from moe_engine.parallel.collectives import Group, SingleRank
from moe_engine.types import FinishReason, NewRow
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.penalties import TreeText
from moe_engine.worker.sampling.slot_tokens import SlotTokens

logger = logging.getLogger("moe_engine")


class ProcessorRequest:
    """``__req__`` of a processor's parameters: the request at one position. Tokens are read when first used; on an
    accelerator that waits for the device."""

    def __init__(self, rid: str, num_prompt: int, read: Any) -> None:
        self.rid = rid
        self._num_prompt = num_prompt
        self._read = read
        self._tokens: list[int] | None = None

    @property
    def origin_input_ids(self) -> list[int]:
        return self._all()[: self._num_prompt]

    @property
    def output_ids(self) -> list[int]:
        return self._all()[self._num_prompt :]

    def _all(self) -> list[int]:
        if self._tokens is None:
            self._tokens = self._read()
        return self._tokens


@dataclass
class _Loaded:
    """The processor of a row; None on ranks that do not run it, or if it could not be loaded."""

    rid: str
    num_prompt: int
    processor: CustomLogitProcessor | None
    params: dict[str, Any]
    problem: str | None = None


@dataclass
class CustomProcessors:
    """The custom processors of all rows.

    Args:
        group: ranks that sample the same tokens.
    """

    slot_table: Tensor
    stream: DeviceStream
    group: Group = field(default_factory=SingleRank)
    errors: dict[int, FinishReason] = field(default_factory=dict)
    """By row, of this step. Taken by `LogitsProcessors.take_errors`."""
    _of: dict[int, _Loaded] = field(default_factory=dict)

    def enter(self, new: NewRow) -> None:
        text = new.sampling.custom_logit_processor
        assert text is not None
        loaded = _Loaded(new.rid, new.num_prompt, None, dict(new.sampling.custom_params or {}))
        if self.group.rank == 0:
            try:
                loaded.processor = CustomLogitProcessor.from_str(text)
            except Exception as error:
                loaded.problem = f"custom_logit_processor: {error}"
        self._of[new.row] = loaded

    def forget(self, row: int) -> None:
        self._of.pop(row, None)

    def apply(
        self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray, tokens: SlotTokens, trees: TreeText | None
    ) -> None:
        """Changes logits [S, V] in place."""
        if not self._of:
            return
        places: dict[int, list[int]] = {}
        for place, row in enumerate(rows.tolist()):
            if row in self._of:
                places.setdefault(row, []).append(place)
        for row, own in places.items():
            index = self.stream.from_list(own, torch.int64)
            values = logits.index_select(0, index)
            if self.group.rank == 0:
                readers = [self._reader(row, i, lengths, tokens, trees) for i in own]
                found = self._run(row, values, readers)
                if found is None and len(own) > 1 and self._of[row].processor is not None:
                    values = logits.index_select(0, index)  # the failed call may have changed them
                    found = self._run_each(row, values, readers)
                values = torch.full_like(values, torch.nan) if found is None else found
            if self.group.size > 1:
                self.group.broadcast(values, 0)
            logits.index_copy_(0, index, values)

    def _run_each(self, row: int, values: Tensor, readers: list[Any]) -> Tensor:
        """Runs the processor for each position: a failure after a draft matters only if the draft is accepted."""
        found = [self._run(row, values[i : i + 1], readers[i : i + 1]) for i in range(len(readers))]
        return torch.cat([torch.full_like(values[:1], torch.nan) if own is None else own for own in found])

    def _run(self, row: int, values: Tensor, readers: list[Any]) -> Tensor | None:
        """The logits [Q, V] that a row's processor returns; None, with an error of the row, if it fails."""
        loaded = self._of[row]
        problem = loaded.problem
        if loaded.processor is not None:
            params = [loaded.params] + [dict(loaded.params) for _ in readers[1:]]
            for own, read in zip(params, readers):
                own["__req__"] = ProcessorRequest(loaded.rid, loaded.num_prompt, read)
            try:
                return _checked(loaded.processor(values, params), values)
            except Exception as error:
                name = type(loaded.processor).__name__
                logger.warning("Custom logit processor %s failed for request %s", name, loaded.rid, exc_info=True)
                problem = f"custom_logit_processor: {name} raised {type(error).__name__}: {error}"
        message = problem or "custom_logit_processor: not loaded"
        self.errors[row] = FinishReason("abort", message=message, status_code=400)
        return None

    def _reader(self, row: int, place: int, lengths: np.ndarray, tokens: SlotTokens, trees: TreeText | None) -> Any:
        """Reads the tokens before the one sampled at a row of logits."""

        def read() -> list[int]:
            if trees is None or place >= len(trees.begins):
                columns = list(range(int(lengths[place])))
            else:
                begin, mask = int(trees.begins[place]), int(trees.masks[place])
                columns = [*range(begin), *(begin + node for node in range(64) if mask >> node & 1)]
            slots = self.slot_table[row].index_select(0, self.stream.from_list(columns, torch.int64))
            found: list[int] = tokens.ids.index_select(0, slots.long()).tolist()
            return found

        return read


def _checked(found: Any, values: Tensor) -> Tensor:
    if not isinstance(found, Tensor) or found.shape != values.shape:
        what = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"it returned {what} for logits of shape {list(values.shape)}")
    return found.to(values).contiguous()
