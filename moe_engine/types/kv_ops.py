"""Copies between the KV pool, a connector's memory and storage, as contained in plans and reported by workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

NO_STATE, LAST_STATE = -1, -2


@dataclass(frozen=True, slots=True)
class KVLoad:
    """Copies KV from `places` of the connector to `slots` of the pool, states from entries of the connector to
    snapshots of the pool, (entry, snapshot) each, and windows from entries to window pages, (entry, window page)
    each. The copy may end after the step."""

    id: int
    places: list[int]
    slots: list[int]
    states: list[tuple[int, int]] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class KVFetch:
    """Reads the pages `keys` from the storage to these pages of the connector's memory; without pages it looks them up.
    Fetches and backups share one numbering.

    state: the entry for the state after the last page, without which no page is read; `LAST_STATE`: a lookup counts
    the pages up to the last one with a state; `NO_STATE`: only pages.
    """

    id: int
    keys: list[bytes]
    pages: list[int]
    state: int = NO_STATE


@dataclass(frozen=True, slots=True)
class KVBackup:
    """Writes these pages of the connector's memory to the storage under `keys`, or the state of an entry (`state`)
    under the one key of the page that it follows."""

    id: int
    keys: list[bytes]
    pages: list[int]
    state: int = NO_STATE


class KVReport(NamedTuple):
    """Progress of a fetch or backup on one rank, or the minimum over all ranks: the number of leading pages that are
    read, found or stored. The operation accesses no memory after the report with `ended`."""

    id: int
    num_pages: int
    ended: bool


@dataclass(frozen=True, slots=True)
class KVOps:
    """Copies between the KV pool and a connector (`scheduler.kv_cache.kv_connector`). Every rank runs them in plan
    order, before the step's forward: it waits for the loads `arrived`, stores, then begins `loads`.

    Stores copy store_slots[i] of the pool to store_places[i]; places are distinct. The step may overwrite the slots.
    `arrived` are loads that the scheduler regards as complete: this step and later steps may use their slots.
    """

    store_slots: list[int] = field(default_factory=list)
    store_places: list[int] = field(default_factory=list)
    loads: list[KVLoad] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    fetches: list[KVFetch] = field(default_factory=list)
    backups: list[KVBackup] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    """Operations of the storage below the connector's memory (`scheduler.tiers.storage_tier`), run after the stores;
    `stops` are fetches and backups that end with their current page. A number repeated after a failed step is begun
    once."""
    serial: int = 0
    """Number of the stores, if a transfer between servers waits for some of them (`scheduler.tiers.prefill_tier`,
    `scheduler.tiers.decode_tier`); 0: no transfer waits."""
    state_stores: list[tuple[int, int]] = field(default_factory=list)
    """Copies of snapshots to entries of the connector, (snapshot, entry) each, before the step's own `StateOps`."""
    window_stores: list[tuple[int, int]] = field(default_factory=list)
    """Copies of window pages to entries of the connector, (window page, entry) each."""


@dataclass(frozen=True, slots=True)
class StateOps:
    """Snapshots of states that a step stores.

    saves: (row, snapshot) pairs, of the states before the step, saved before new rows overwrite them.
    cuts: (row, length, snapshot), of the state after the first `length` tokens of a row, which this step computes.
    """

    saves: list[tuple[int, int]] = field(default_factory=list)
    cuts: list[tuple[int, int, int]] = field(default_factory=list)
