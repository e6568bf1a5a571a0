"""What a core process is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_engine.executor.options import RankGroupOptions
from moe_engine.processes.zmq_sockets import JobKeys


@dataclass(frozen=True)
class CoreSpec:
    """All a core process needs; travels as a pickle. `config` is the resolved configuration.

    The addresses are of attention group 0; the cores of other groups on this node add their number.
    """

    config: Any
    to_core_address: str
    from_core_address: str
    ready_address: str
    board_path: Path
    outside_models: list[tuple[str, str, str]]
    """Architectures the user registered in the parent, as `models.registry.register` takes them."""
    import_path: list[str]
    """The parent's sys.path, where their modules are found."""
    ranks: RankGroupOptions | None = None
    """Of the ranks that the core leads; None where it is alone."""
    front_address: str = ""
    """Where the front end listens for cores on other nodes."""

    @property
    def keys(self) -> JobKeys | None:
        """Of sockets between nodes."""
        return self.ranks.keys if self.ranks is not None else None

    def board_of(self, group: int) -> Path:
        return self.board_path.with_name(f"board-{group}") if group else self.board_path

    def to_core_of(self, group: int | str) -> str:
        """Of a group's core; of the process above them under a name."""
        return f"{self.to_core_address}-{group}" if group else self.to_core_address
