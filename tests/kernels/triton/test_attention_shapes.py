"""Byte and operation floors of the named attention shapes, against counts of the actual tensors."""

from __future__ import annotations

import torch

from moe_engine.kernels.attention.shapes import DEEPSEEK_V2_LITE, DEEPSEEK_V3_FP8, LLAMA_3_8B, named_shapes


def test_floors_are_what_tensors_and_masks_count() -> None:
    shape = DEEPSEEK_V2_LITE.expanded(3, 5, 12)
    q, kv = torch.empty(15, 16, 192, dtype=torch.bfloat16), torch.empty(36, 16, 256, dtype=torch.bfloat16)
    rope, out = torch.empty(36, 64, dtype=torch.bfloat16), torch.empty(15, 16, 128, dtype=torch.bfloat16)
    assert shape.bytes == sum(x.numel() * 2 for x in (q, kv, rope, out))
    visible = int(torch.ones(5, 12).tril(7).sum())
    assert shape.flops == 3 * visible * 16 * 2 * (192 + 128)
    decode = LLAMA_3_8B.paged(2, 1, 9)
    assert decode.flops == 2 * 9 * 32 * 2 * 256
    assert decode.bytes == 2 * (2 * 2 * 32 * 128 + 2 * 9 * 2 * 8 * 128)
    records = DEEPSEEK_V3_FP8.absorbed(1, 1, 100)
    assert records.bytes == 100 * 656 + 2 * 128 * (576 + 512)


def test_names_are_unique() -> None:
    shapes = list(named_shapes())
    assert len({shape.name for shape in shapes}) == len(shapes)
    assert all(shape.bytes > 0 and shape.flops > 0 for shape in shapes)
