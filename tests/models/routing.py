"""Experts that depend on rounding: two sums of the same router scores may select different experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROUNDING = 1e-5
NUM_DRAWS = 10
"""Disturbed passes: one changes the order of two scores that differ by less in half of the cases."""


def num_clearly_routed(model: torch.nn.Module, ids: list[int]) -> int:
    """The number of first tokens whose experts stay the same when the inputs of the routers change by `ROUNDING`.

    Args:
        model: transformers' model.
    """
    chosen: list[list[Tensor]] = []
    scales = (0.0, *[ROUNDING] * NUM_DRAWS)
    generator = torch.Generator().manual_seed(0)

    def disturb(_router: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        noise = torch.randn(inputs[0].shape, generator=generator, dtype=inputs[0].dtype)
        return inputs[0] * (1 + scales[len(chosen) - 1] * noise), *inputs[1:]

    def record(_experts: Any, inputs: tuple[Tensor, ...]) -> None:
        chosen[-1].append(inputs[1].reshape(len(ids), -1).sort(-1).values)

    hooks = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            hooks.append(module.register_forward_pre_hook(disturb))
        elif name.endswith("mlp.experts"):
            hooks.append(module.register_forward_pre_hook(record))
    try:
        for _ in scales:
            chosen.append([])
            with torch.inference_mode():
                model(torch.tensor([ids]))
    finally:
        for hook in hooks:
            hook.remove()
    same = torch.ones(len(ids), dtype=torch.bool)
    for layer in zip(*chosen):
        same &= torch.stack([(other == layer[0]).all(-1) for other in layer]).all(0)
    return int(same.cumprod(0).sum())
