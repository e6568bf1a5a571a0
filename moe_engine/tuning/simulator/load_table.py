"""The production router over the groups of a simulation, whose loads are arrays: reading hundreds of `Load` objects
would take longer than the routing of a request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from moe_engine.frontend.dp_routing import WEIGHTS, Load, Room, Router


@dataclass(frozen=True)
class LoadTable(Sequence[Load]):
    """Unfinished work by group, as of `Load`."""

    num_requests: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_uncomputed: NDArray[np.int64]

    @classmethod
    def of(cls, num_groups: int) -> LoadTable:
        return cls(*np.zeros((3, num_groups), np.int64))

    def __len__(self) -> int:
        return len(self.num_requests)

    @overload
    def __getitem__(self, index: int) -> Load: ...
    @overload
    def __getitem__(self, index: slice) -> LoadTable: ...
    def __getitem__(self, index: int | slice) -> Load | LoadTable:
        """A slice is a view: changes of it are changes of this table."""
        parts = self.num_requests[index], self.num_tokens[index], self.num_uncomputed[index]
        return LoadTable(*parts) if isinstance(index, slice) else Load(*map(int, parts))


class TableRouter(Router):
    """Makes the choices of `Router` with the loads of a table."""

    def __init__(self, num_endpoints: int, method: str, room: Room | None = None) -> None:
        super().__init__(num_endpoints, method, room)
        self.loads = self.table = LoadTable.of(num_endpoints)
        self._columns = [getattr(self.table, name) for name in WEIGHTS[method]]

    def _least_loaded(self, able: Sequence[int]) -> int:
        found: NDArray[np.int64] | None = None if len(able) == len(self.table) else np.sort(able)
        for column in self._columns:
            weights = column if found is None else column[found]
            least = (weights == weights[weights.argmin()]).nonzero()[0]
            found = least if found is None else found[least]
            if len(found) == 1:
                return int(found[0])
        equal = range(len(self.table)) if found is None else found.tolist()
        return equal[bisect_left(equal, self._next) % len(equal)]
