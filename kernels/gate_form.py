"""The forms of activations in MLPs and experts, most of them gated. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GatedActivation:
    """How gate and up become one row; at most one of `alpha`, `beta` and `squared` is set.

    Attributes:
        limit: gate is at most `limit` and up within +-limit, before silu(gate) * up (DeepSeek V4). A negative one:
            silu(gate) is at most -limit instead (Ling). 0: no limit. `GELU_LIMIT`: gelu(gate) * up, with the
            approximation by tanh, and no limit (Gemma).
        alpha: gate * sigmoid(alpha * gate) * (up + 1), after the limit (gpt-oss, MiniMax-M3).
        beta: SiTU (Kimi K3): beta * tanh(gate / beta) * sigmoid(gate) * up, with limit * tanh(up / limit) for up if
            there is a limit.
        squared: relu(up)^2, without a gate (Nemotron-H). Experts have the halves of up in the places of gate and up,
            and the halves of the row are theirs.
    """

    limit: float = 0.0
    alpha: float = 0.0
    beta: float = 0.0
    squared: bool = False

    @property
    def is_silu(self) -> bool:
        """True if silu(gate) or gelu(gate) is a factor; then `limit` says which, and calls may take it alone."""
        return not self.alpha and not self.beta and not self.squared

    @property
    def clamp(self) -> bool | str:
        """`clamp_of` the limit; False if it cuts no values."""
        return False if self.beta else clamp_of(self.limit)


def clamp_of(limit: float) -> bool | str:
    """Constant of a kernel that takes the limit: whether it cuts values, or ``gelu``."""
    return "gelu" if limit == GELU_LIMIT else limit != 0


GELU_LIMIT = -math.inf
SILU = GatedActivation()
GELU = GatedActivation(GELU_LIMIT)
SQUARED = GatedActivation(squared=True)
