"""Scratch memory of sampling kernels written in torch: how many logits they work on at once. Imports no torch."""

from __future__ import annotations

MAX_ELEMENTS = 1 << 22
"""Logits worked on at once where a draw needs several copies of them, on an accelerator."""

CACHED_ELEMENTS = 1 << 20
"""The same where there is no launch to save: copies that fit the cache (measured on a CPU: half the time)."""

HOST_SCRATCH_BYTES = 40 * CACHED_ELEMENTS
"""Of the largest draw in the host's memory: 36 bytes a logit, by a sort."""

DEVICE_SCRATCH_BYTES = 48 * MAX_ELEMENTS
"""The same on an accelerator, and what sorting itself takes there."""
