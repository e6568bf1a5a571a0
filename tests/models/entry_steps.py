"""Steps of models with entries of several tokens: their logits equal those of the whole text; their memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_engine.models import sizes
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_pool import KVPool, kv_spec
from tests.models import stepper
from tests.models.test_parity import assert_close, whole

PAGE = 16


def check_parts(path: Path, row: str, tokens: list[int], want: Tensor, cut: int) -> None:
    """A whole prompt; chunks that end inside of entries, the second at `cut`; decodes, several tokens of a decode."""
    assert_close(whole(stepper.load(path, row, page_size=PAGE), tokens), want)
    model = stepper.load(path, row, seed=1, page_size=2 * PAGE)
    got = [whole(model, tokens[:3]), whole(model, tokens[3:cut]), whole(model, tokens[cut:60])]
    got += [whole(model, [token], decode=True) for token in tokens[60:80]]
    got += [whole(model, tokens[80:85], decode=True), whole(model, tokens[85:])]
    assert_close(torch.cat(got), want)


def check_mixed_batches(path: Path, row: str, tokens: list[int], want: Tensor, chunk: int) -> None:
    """Sequences within the window, with few entries and beyond the top-k in one step; decodes and prompts, the second
    chunk of one with `chunk` tokens."""
    steps = (
        ((0, 2, False), (1, 60, False), (2, 17, False), (3, 1, False)),
        ((0, 1, True), (1, 3, True), (2, 5, False), (3, 4, False), (4, 90, False)),
        ((0, 1, True), (3, 1, True), (1, chunk, False), (2, 9, False), (4, 5, False)),
        ((3, 1, True), (0, 3, False)),
    )
    for got in stepper.load(path, row, seed=2, page_size=PAGE).run(tokens, steps):
        assert_close(got, want[: len(got)])


def check_ledger(path: Path) -> None:
    """The bytes of the weights, and of pools with and without bounded windows, are those of the ledger."""
    model = stepper.load(path, "torch", page_size=PAGE)
    counted = sizes.weight_bytes(model.config, 4)
    assert model.model.weight_bytes == pytest.approx(counted, rel=0.01)  # type: ignore[attr-defined]
    config = model.config
    for window_slots, drafts, rows in ((0, 0, 3), (64, 2, 5)):
        windowed = config.windowed_layers if window_slots else ()
        pool = KVPool(
            kv_spec(config, "bfloat16", draft_slots=drafts), 160, PAGE, DeviceStream("cpu"), windowed=windowed,
            num_window_slots=window_slots, max_rows=rows,
        )  # fmt: skip
        of_windows = config.kv_bytes_of(config.windowed_layers, "bfloat16", drafts)
        entries = config.kv_bytes_per_token("bfloat16", draft_slots=drafts) - of_windows
        of_requests = (rows + 1) * config.kept_bytes_of_request("bfloat16", drafts)
        assert pool.num_bytes == (160 + PAGE) * entries + ((window_slots or 160) + PAGE) * of_windows + of_requests
        assert sum(pool.row_widths) + sum(pool.window_widths) == entries + of_windows
