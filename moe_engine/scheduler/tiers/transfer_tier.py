"""A host tier whose places take part in transfers between servers: what both sides of disaggregation share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from moe_engine.scheduler.kv_cache.prefix_keys import bigrams
from moe_engine.scheduler.tiers.host_tier import HostTier
from moe_engine.scheduler.tiers.transfer_link import TransferLink
from moe_engine.types import Request
from moe_engine.types.step_settings import StorageSettings


class TransferTier(HostTier, ABC):
    """Implements `KVConnector`; `PrefillTier` sends, `DecodeTier` receives."""

    copies: ClassVar[str] = "moe_engine.worker.kv_cache.transfer_copies:TransferCopies"
    state_rows = 0
    """Rows of a state in a transfer (`state_transfers`), set by the owner of the scheduler; 0: no states."""

    def _prepare(self) -> None:
        self.link = TransferLink()
        self._bigrams = False
        self._serial = 0
        """Number of the last plan whose copies the transfer thread waits for."""

    def configure(self, write_policy: str, storage: StorageSettings | None, bigrams: bool) -> None:
        super().configure(write_policy, storage, bigrams)
        self._bigrams = bigrams

    @property
    @abstractmethod
    def num_transfers(self) -> int: ...

    @abstractmethod
    def enter(self, request: Request, step: int) -> None:
        """Begins the transfer of a request that was queued and names a room."""

    @abstractmethod
    def exchange(self, step: int) -> None:
        """Applies the reports of the transfer thread; on the scheduler's thread."""

    def _keys(self, request: Request) -> list[int]:
        """Keys of the prompt in the radix cache."""
        return bigrams(request.prompt_ids) if self._bigrams else request.prompt_ids

    def renew(self, weights: str) -> None:
        """The weights have changed; the cache is empty. Transfers to or from a server with weights of another name are
        refused."""
        self.link.weights = weights

    def reset(self) -> None:
        super().reset()
        held = set(self.held_pages())
        self._free = [page for page in self._free if page not in held]
