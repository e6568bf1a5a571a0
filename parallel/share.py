"""Sharding: the part of a width that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_engine.parallel.collectives import Group


@dataclass(frozen=True)
class Share:
    """Part `rank` of `size` equal parts."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: Group) -> Share:
        """This rank's part in its group."""
        return cls(group.rank, group.size)

    def width(self, total: int) -> int:
        """Raises ValueError if the parts are not equal (`Topology.check` runs first and names the flags)."""
        if total % self.size:
            raise ValueError(f"{total} cannot be split into {self.size} equal parts")
        return total // self.size

    def cut(self, total: int) -> slice | None:
        """The part as a slice of `total`; None for the whole."""
        if self.size == 1:
            return None
        width = self.width(total)
        return slice(self.rank * width, (self.rank + 1) * width)

    def cut_in_groups(self, total: int, group: int) -> slice | None:
        """`cut` that splits no group of `group`: ranks hold nearly equal numbers of groups, the first the most. Parts
        are equal if these are whole groups, or if `total` is not groups for every rank."""
        count, rest = divmod(total, group)
        if rest or count < self.size or self.size == 1 or self.width(total) % group == 0:
            return self.cut(total)
        start, stop = (-(-rank * count // self.size) * group for rank in (self.rank, self.rank + 1))
        return slice(start, stop)

    @property
    def is_first(self) -> bool:
        """True on the rank that adds terms that count once in a sum over the group (a bias)."""
        return self.rank == 0


WHOLE = Share()


def heads_share(share: Share, num_heads: int) -> Share:
    """The part of `num_heads` KV heads for a part of the query heads: if there are fewer KV heads than ranks, adjacent
    ranks hold the same head."""
    if num_heads >= share.size:
        return share
    return Share(share.rank * num_heads // share.size, num_heads)
