"""Experts that depend on rounding: two sums of the same router scores may select different experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

ROUNDING = 1e-5
NUM_DRAWS = 10
"""Disturbed inputs of a router: one changes the order of two scores that differ by less in half of the cases."""


@contextmanager
def observed_routers(model: torch.nn.Module, num_tokens: int) -> Iterator[list[Tensor]]:
    """While texts of `num_tokens` tokens run in this context, each router appends [T] flags: the token's experts stay
    the same when the inputs of the router change by `ROUNDING`.

    Args:
        model: transformers' model.
    """
    flags = [torch.ones(num_tokens, dtype=torch.bool)]
    generator = torch.Generator().manual_seed(0)

    def draw(router: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        states = inputs[0].reshape(num_tokens, -1)
        noise = torch.randn(NUM_DRAWS, *states.shape, generator=generator, dtype=states.dtype)
        _, _, drawn = router.forward((states * (1 + ROUNDING * noise)).flatten(0, 1), *inputs[1:])
        experts = output[2].sort(-1).values
        flags.append((drawn.view(NUM_DRAWS, *experts.shape).sort(-1).values == experts).all(-1).all(0))

    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(draw) for router in routers]
    try:
        yield flags
    finally:
        for hook in hooks:
            hook.remove()
    assert len(flags) > len(routers), "a router was not called"


def num_clear(flags: list[Tensor]) -> int:
    """The number of first tokens with all flags."""
    return int(torch.stack(flags).all(0).cumprod(0).sum())


def routed_logits(model: torch.nn.Module, ids: list[int]) -> tuple[Tensor, int]:
    """Logits [T, V] of transformers' model, and the number of first tokens whose experts do not depend on rounding."""
    with observed_routers(model, len(ids)) as flags, torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    return logits, num_clear(flags)
