"""Fused decode step: a decode-only step without drafts, in one kernel call if available.

Short steps are dominated by host overhead: the torch calls around the model run with cold caches after its weights,
and each releases the interpreter lock to the scheduler's thread, which keeps it until its own work is done. The fused
step makes no torch calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from moe_engine.kernels.decoder.decode_step import DecodeRows, DecodeTables, FusedDecodeStep
from moe_engine.kernels.decoder.layers import most_tokens
from moe_engine.models.batch import Model
from moe_engine.models.layers.attention.mla import MLAAttention
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.step_memory import expanded_prefix
from moe_engine.types import StepPlan
from moe_engine.worker.batch.expanded_prefix import ExpandedPrefix, Layers
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.sampling.sampler import Sampler

Advance = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
"""Gets rows [R] that were advanced to lengths [R], and their next tokens [R] >= 0; all int64."""


class FusedDecode:
    """Runs decodes of rows whose tokens are only sampled.

    Args:
        kv: the KV caches of the layers.
        advance: called after each step.
        prefixes: of decodes that share one; None: all attention is absorbed.
    """

    def __init__(
        self,
        step: FusedDecodeStep,
        rows: RequestRows,
        sampler: Sampler,
        kv: Sequence[Any],
        advance: Advance | None = None,
        prefixes: ExpandedPrefix | None = None,
    ) -> None:
        self.prefixes = prefixes
        self._shares = False  # decodes of the last step read the prefix
        self._seen = -1  # changes of the rows for which the prefix was sought
        self._advance = advance
        self._step = step
        self._rows = rows
        self._sampler = sampler
        self._kv = kv
        self._most = min(most_tokens(rows.vocab_size), sampler.passes.rows_at_once)
        self._same = DecodeRows([])

    def takes(self, plan: StepPlan) -> bool:
        """Whether a step can be fused."""
        if not plan.is_pure_decode or plan.num_decodes > self._most:
            return False
        if self._same.listed != plan.rows:
            self._same = DecodeRows(list(plan.rows))
            self._seen = -1
        return self._rows.only_sample(plan.rows, self._same.rows)

    def forget_prefix(self) -> None:
        """Weights or KV cache get other values."""
        if self.prefixes is not None:
            self.prefixes.forget()
        self._seen = -1

    def run(self, plan: StepPlan) -> np.ndarray:
        """The sampled tokens [R] int64 of a step that is taken; updates slots and last tokens of its rows.
        The result is valid until the next step.

        Raises:
            ValueError: a row has no space for its token.
        """
        same = self._same
        same.place(plan.starts, plan.slots)
        parameters, uniform = self._sampler.parameters(same.rows), None
        if parameters is not None:
            uniform = self._sampler.numbers(same.rows, same.positions + 1)
        if self.prefixes is not None and self._seen != self._rows.changes:
            self._shares = self.prefixes.of(same.rows, same.positions) is not None
            self._seen = self._rows.changes
        prefix = self.prefixes.prefix if self.prefixes is not None and self._shares else None
        tokens = self._step.run(same, self._kv, parameters, uniform, prefix)
        if self._advance is not None:
            self._advance(same.rows, same.positions + 1, np.maximum(tokens, 0))
        return tokens


def fused_decode(
    model: Model,
    rows: RequestRows,
    sampler: Sampler,
    kv: Sequence[Any],
    windows: Sequence[int | None],
    advance: Advance | None,
    expands: bool = False,
) -> FusedDecode | None:
    """None if a part of the model, of its cache or of sampling has no kernel in the call.

    Args:
        windows: of the model's cache groups.
        expands: attention to a prefix of many decodes may be expanded; results then depend on the batch.
    """
    special = rows.windows is not None or rows.images is not None or len(windows) != 1
    if special or not isinstance(model, Decoder) or sampler.kernel.name != "cpu":
        return None
    step = model.decode_step(DecodeTables(rows.slot_table, rows.last_token, windows[0]))
    if step is None:
        return None
    prefixes = _prefixes(model, rows, kv) if expands else None
    return FusedDecode(step, rows, sampler, kv, advance, prefixes)


def _prefixes(model: Decoder, rows: RequestRows, kv: Sequence[Any]) -> ExpandedPrefix | None:
    """None if attention has another form, or no prefix fits into the memory."""
    dtype, layers = model.embedding.weight.dtype, [layer.attention for layer in model.layers]
    most, _ = expanded_prefix(model.config, dtype.itemsize)
    if not most or not all(isinstance(layer, MLAAttention) and layer.expands_slots for layer in layers):
        return None

    def expand(slots: np.ndarray) -> Layers:
        where = torch.from_numpy(slots)
        return {i: layer.expand_slots(kv[i], where, dtype) for i, layer in enumerate(layers)}

    return ExpandedPrefix(rows, expand, most, len(layers))
