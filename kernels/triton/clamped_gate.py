"""The clamp of a gated activation, part of the kernels that compute one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clamp_gate_up(gate, up, limit):
    """gate at most `limit` if it is positive, up within +-limit; NaN stays."""
    bound = tl.abs(limit)
    gate = tl.where((limit > 0) & (gate > bound), bound, gate)
    up = tl.where(up > bound, bound, up)
    return gate, tl.where(up < -bound, -bound, up)


@triton.jit
def bound_silu(active, limit):
    """silu(gate) at most -limit if `limit` is negative; NaN stays."""
    return tl.where((limit < 0) & (active > -limit), -limit, active)


@triton.jit
def gelu(x):
    """x * (1 + tanh(y)) / 2 = x * sigmoid(2 y), y = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def silu_mul(gate, up, limit, CLAMP: tl.constexpr):
    """silu(gate) * up. CLAMP (`clamp_of`): with `limit` as in `Ops.silu_and_mul`."""
    if CLAMP == "gelu":
        active = gelu(gate)
    else:
        if CLAMP:
            gate, up = clamp_gate_up(gate, up, limit)
        active = gate * tl.sigmoid(gate)
        if CLAMP:
            active = bound_silu(active, limit)
    return active * up


@triton.jit
def squared_relu(x):
    """relu(x)^2; NaN stays."""
    return tl.where(x < 0.0, 0.0, x * x)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def situ(gate, up, limit, beta):
    """beta * tanh(gate / beta) * sigmoid(gate) * up, with up = limit * tanh(up / limit) if there is a limit."""
    bounded = limit * _tanh(up / tl.where(limit > 0, limit, 1.0))
    return beta * _tanh(gate / beta) * tl.sigmoid(gate) * tl.where(limit > 0, bounded, up)
