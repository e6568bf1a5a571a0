"""Experts that depend on rounding: two sums of the same router scores may select different experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROUNDING = 1e-5
NUM_DRAWS = 10
"""Disturbed copies of a text: one changes the order of two scores that differ by less in half of the cases."""


def num_clearly_routed(model: torch.nn.Module, ids: list[int]) -> int:
    """The number of first tokens whose experts stay the same when the inputs of the routers change by `ROUNDING`.

    Args:
        model: transformers' model.
    """
    chosen: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)

    def disturb(_router: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        noise = torch.randn(inputs[0].shape, generator=generator, dtype=inputs[0].dtype)
        rows = noise.view(NUM_DRAWS + 1, -1)
        rows[0] = 0.0
        return inputs[0] * (1 + ROUNDING * noise), *inputs[1:]

    def record(_experts: Any, inputs: tuple[Tensor, ...]) -> None:
        chosen.append(inputs[1].reshape(NUM_DRAWS + 1, len(ids), -1).sort(-1).values)

    hooks = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            hooks.append(module.register_forward_pre_hook(disturb))
        elif name.endswith("mlp.experts"):
            hooks.append(module.register_forward_pre_hook(record))
    if not hooks:
        return len(ids)
    try:
        with torch.inference_mode():
            model(torch.tensor([ids] * (NUM_DRAWS + 1)))
    finally:
        for hook in hooks:
            hook.remove()
    assert chosen, "no experts were seen"
    same = torch.stack([(layer == layer[0]).all(-1).all(0) for layer in chosen]).all(0)
    return int(same.cumprod(0).sum())
