"""Interface to KV outside the pool: host RAM, storage, other servers. Method names are vLLM's.

The scheduler side, here, decides and does the bookkeeping: it hands evicted blocks to the connector before their slots
are reused, lets requests wait for KV (`Status.WAITING_FOR_KV`), and sends the copies in plans (`StepPlan.kv_ops`).
The worker side (`worker.kv_cache.kv_copies`) runs the copies and reports finished loads: in a result
(`StepResult.kv_done`), or to an idle core (`Worker.on_kv_done`). Without a connector a plan has no `kv_ops`, and no
step runs any of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from moe_engine.scheduler.kv_cache.radix_cache import Node, RadixCache
from moe_engine.scheduler.waiting_queue import Waiting
from moe_engine.types import KVOps


class KVConnector(Protocol):
    """The scheduler side. One owner: the `KVCacheManager`."""

    copies: ClassVar[str]
    """Path of the worker side, ``package.module:Class``."""

    @property
    def tree(self) -> RadixCache:
        """The radix cache, which hands evicted blocks to the connector."""

    @property
    def num_loaded_tokens(self) -> int:
        """Tokens loaded since the start."""

    @property
    def num_loading(self) -> int:
        """Loads without a report of completion."""

    @property
    def has_new_ops(self) -> bool:
        """Whether there are operations for which an idle engine runs a step."""

    @property
    def num_stored(self) -> int:
        """Tokens that the connector holds."""

    @property
    def num_places(self) -> int:
        """Tokens that the connector can hold."""

    def get_num_new_matched_tokens(self, entry: Waiting) -> int:
        """Tokens of a waiting request behind its cached prefix that can be loaded, or are being loaded."""

    def start_load(self, entry: Waiting, step: int) -> bool:
        """Allocates slots and loads these tokens with the next plan, or joins a load of them; the request waits for
        KV. False, without a change, if there is no room.

        Args:
            step: the last planned step.
        """

    def build_connector_meta(self) -> KVOps | None:
        """The copies of the next plan."""

    def update_connector_output(self, kv_done: Iterable[int], step: int) -> None:
        """Loads are complete: their tokens are cached, and the requests that waited for them may be admitted."""

    def steps_failed(self, ops: Sequence[KVOps], step: int) -> None:
        """These copies may not have run: drops their stores, and abandons all loads. Requests wait no longer."""

    def reset(self) -> None:
        """Drops all entries; the tree is flushed and all slots are freed by the caller."""

    def held_nodes(self) -> list[Node]:
        """Nodes locked by loads."""

    def held_slots(self) -> list[int]:
        """Slots of abandoned loads, by whole pages; they are in no node."""

    def check_integrity(self) -> list[str]:
        """Recounts the owners of places, repairs errors and returns the findings."""
