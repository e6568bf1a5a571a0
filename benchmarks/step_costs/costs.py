"""The registry of cost functions by kernel, and their inputs. A kernel without a cost function is an error, not zero.

A Triton kernel's function takes the kernel's arguments by name, as a namespace; a library's takes the call's own
arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.step_costs.cost import Cost
from benchmarks.step_costs.hardware import Hardware
from benchmarks.step_work import share_touched


class UnknownKernel(LookupError):
    """A kernel without a cost function."""


@dataclass(frozen=True)
class Setting:
    """Inputs of cost functions besides the arguments: `context` tokens of a request, `routing` of rows to experts, and
    measured times of messages. seen: records that attention of the layer reads for a query token; None: the context."""

    context: int
    routing: Routing
    hardware: Hardware | None = None
    seen: int | None = None

    @property
    def records(self) -> int:
        """Records that attention reads for a query token."""
        return self.context if self.seen is None else self.seen


@dataclass(frozen=True)
class Routing:
    """Expected routing of a step's tokens, uniform: each token takes `top_k` of `num_experts` experts.

    tokens: tokens of all ranks that share the experts. local: experts of this rank. shared: shared experts after them,
    which every token uses. target_ranks: ranks that a token may choose.
    """

    tokens: int
    top_k: int
    num_experts: int
    local: int
    shared: int = 0
    target_ranks: float = 1.0

    @property
    def rows(self) -> float:
        """Expected (token, expert) pairs on this rank."""
        routed = self.tokens * self.top_k * self.local / self.num_experts if self.num_experts else 0.0
        return routed + self.tokens * self.shared

    @property
    def each(self) -> list[int]:
        """Expected rows of each local expert."""
        return [round(self.rows / self.local)] * self.local if self.local else []

    @property
    def touched(self) -> float:
        """Expected local experts with a token."""
        return self.local * share_touched(self.tokens, self.top_k, self.num_experts) + self.shared

    def rows_in_tiles(self, tile: int) -> float:
        """Expected rows of the tiles of `tile` rows that hold the rows of each expert."""
        each = _tiles(self.tokens, self.top_k / self.num_experts, tile) if self.num_experts else 0.0
        return tile * (self.local * each + self.shared * -(-self.tokens // tile))

    def check_slots(self, slots: int) -> None:
        """Raises ValueError if a launch has other numbers of experts than this routing."""
        if slots != self.local + self.shared:
            raise ValueError(f"a launch has {slots} experts, the case {self.local} and {self.shared} shared ones")


@lru_cache
def _tiles(tokens: int, chance: float, tile: int) -> float:
    """Expected tiles of an expert that each token chooses with this chance: of a binomial number of rows."""
    if chance >= 1:
        return -(-tokens // tile)
    rows = np.arange(tokens + 1)
    odds = np.log((tokens - rows[:-1]) / rows[1:]) + math.log(chance / (1 - chance))
    logs = np.concatenate(([0.0], odds)).cumsum() + tokens * math.log1p(-chance)
    return float(np.exp(logs) @ -(-rows // tile))


CostFunction = Callable[..., Cost]
KERNELS: dict[str, CostFunction] = {}


def cost_of(*names: str) -> Callable[[CostFunction], CostFunction]:
    """Declares the cost of kernels by name."""

    def declare(function: CostFunction) -> CostFunction:
        for name in names:
            if name in KERNELS:
                raise ValueError(f"{name} has two cost functions")
            KERNELS[name] = function
        return function

    return declare


def kernel_cost(name: str, arguments: Any, setting: Setting) -> Cost:
    """Raises UnknownKernel: no cost function is declared."""
    if name not in KERNELS:
        raise UnknownKernel(f"{name} has no cost function: declare one in benchmarks/step_costs (@cost_of('{name}'))")
    return KERNELS[name](arguments, setting)


def memory_of(x: Tensor) -> int:
    """Address of the memory that a tensor is part of."""
    return x.untyped_storage().data_ptr()


def size(*tensors: Tensor | None) -> int:
    """Bytes of tensors; an element that a view repeats counts once."""
    total = 0
    for x in tensors:
        if x is None:
            continue
        count = 1
        for length, step in zip(x.shape, x.stride()):
            count *= length if step or length == 1 else 1
        total += count * x.element_size()
    return total
