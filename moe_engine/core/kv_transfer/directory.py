"""Where the ranks of a prefill server listen: kept at its bootstrap port, by rank 0 of its first attention group."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_engine.core.kv_transfer.layout import Layout


@dataclass(frozen=True)
class Home:
    """A rank among those of its server: `rank` of attention group `group`. `bootstrap`: the address at which it
    registers; empty for the rank that owns the directory."""

    num_groups: int = 1
    group: int = 0
    rank: int = 0
    bootstrap: str = ""
    advertised: str = ""
    """Host for decode servers; empty: the one at which they reach the bootstrap port."""


@dataclass
class Directory:
    """An address is ``HOST:PORT``, with an empty host where it is that of the bootstrap port, or empty for the
    bootstrap port itself."""

    num_groups: int
    layout: Layout
    _addresses: dict[tuple[int, int], str] = field(default_factory=dict)

    def register(self, group: int, rank: int, address: str) -> None:
        if 0 <= group < self.num_groups and 0 <= rank < self.layout.num_ranks:
            self._addresses[group, rank] = address

    def groups(self) -> list[list[str]] | None:
        """The ranks' addresses by group; None while one is missing."""
        ranks = range(self.layout.num_ranks)
        found = [[self._addresses.get((group, rank)) for rank in ranks] for group in range(self.num_groups)]
        if any(address is None for addresses in found for address in addresses):
            return None
        return found  # type: ignore[return-value]


def address_at(advertised: str, bootstrap: str) -> str:
    """The ZeroMQ address of a rank, from its entry in the directory at the address `bootstrap`."""
    if not advertised:
        return bootstrap
    host, _, port = advertised.rpartition(":")
    return f"tcp://{host}:{port}" if host else f"{bootstrap.rpartition(':')[0]}:{port}"
