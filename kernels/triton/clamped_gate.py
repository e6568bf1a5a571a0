"""The clamp of a gated activation, part of the kernels that compute one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clamp_gate_up(gate, up, limit):
    """gate at most `limit`, up within +-limit; NaN stays."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, up)
    return gate, tl.where(up < -limit, -limit, up)
