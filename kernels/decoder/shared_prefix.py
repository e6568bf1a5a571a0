"""A prefix shared by decodes of a step, with its keys and values expanded per head once for many steps.

Legend: H heads, N qk_nope, P rotary width, V v_head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from moe_engine.kernels.decoder.layers import L, P

BLOCK = 128
"""Prefixes have a multiple of this number of tokens."""


class _Prefix(ctypes.Structure):
    _fields_ = [("length", L), ("members", L), ("requests", P), ("kv", P), ("rope", P)]


@dataclass
class SharedPrefix:
    """Keys and values of a prefix, as whole decode steps read them; `assign` says which decodes begin with it."""

    layers: Sequence[tuple[Tensor, Tensor]]
    """Layer by layer keys and values [S, H, N+V], rotary channels of the keys [S, P]; rows contiguous."""
    address: int = field(init=False)

    def __post_init__(self) -> None:
        kv, rope = zip(*self.layers)
        self.length = len(kv[0])
        if self.length % BLOCK or not all(x.is_contiguous() and len(x) == self.length for x in (*kv, *rope)):
            raise ValueError(f"a prefix of {self.length} tokens is not contiguous, or no multiple of {BLOCK} tokens")
        addresses = [(P * len(part))(*(x.data_ptr() for x in part)) for part in (kv, rope)]
        self._struct = _Prefix(self.length, 0, None, *map(ctypes.addressof, addresses))
        self._keep: tuple[Any, ...] = tuple(addresses)
        self.address = ctypes.addressof(self._struct)

    def assign(self, requests: np.ndarray) -> None:
        """Sets the requests that begin with the prefix: places in the step [M] int64, of one token each."""
        self._requests = requests
        self._struct.members, self._struct.requests = len(requests), requests.ctypes.data
