"""Scratch memory of sampling kernels written in torch: logits processed at once. Imports no torch."""

from __future__ import annotations

MAX_ELEMENTS = 1 << 22
"""Max logits processed at once on an accelerator; sampling needs several copies of them."""

CACHED_ELEMENTS = 1 << 20
"""The same on a CPU, without launch overhead: copies that fit the cache (measured: half the time)."""

HOST_SCRATCH_BYTES = 40 * CACHED_ELEMENTS
"""Bytes of the largest sampling pass in host memory: 36 bytes per logit, for a sort."""

DEVICE_SCRATCH_BYTES = 48 * MAX_ELEMENTS
"""The same on an accelerator, including the sort's own memory."""
