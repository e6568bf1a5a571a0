"""Specification that a core process is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_engine.executor.options import RankGroupOptions
from moe_engine.processes.zmq_sockets import JobKeys

REPORTED_FAILURE = 3
"""Exit code of a core whose last message is its failure."""


@dataclass(frozen=True)
class CoreSpec:
    """Everything a core process needs; sent as a pickle. `config` is the resolved configuration.

    The addresses are those of attention group 0; cores of other groups on this node append their number.
    """

    config: Any
    to_core_address: str
    from_core_address: str
    ready_address: str
    status_path: Path
    outside_models: list[tuple[str, str, str]]
    """Architectures registered by the user in the parent: arguments of `models.registry.register`."""
    import_path: list[str]
    """The parent's sys.path, to find their modules."""
    ranks: RankGroupOptions | None = None
    """Options of the core's rank group; None with a single rank."""
    front_address: str = ""
    """Address at which the frontend listens for cores on other nodes."""

    @property
    def keys(self) -> JobKeys | None:
        """CURVE keys of sockets between nodes."""
        return self.ranks.keys if self.ranks is not None else None

    def status_path_of(self, group: int) -> Path:
        return self.status_path.with_name(f"status-{group}") if group else self.status_path

    def to_core_of(self, group: int) -> str:
        return f"{self.to_core_address}-{group}" if group else self.to_core_address
