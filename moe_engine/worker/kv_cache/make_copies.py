"""Builds the worker side of the KV connector, with storage below it, for one rank."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.kv_connectors import copies_class
from moe_engine.models.config import ModelConfig
from moe_engine.models.sharding import local_config
from moe_engine.parallel.context import ParallelContext
from moe_engine.storage.fingerprint import fingerprint_of
from moe_engine.storage.protocol import PageStorage
from moe_engine.storage.sealed_pages import SealedPages
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.host_states import HostStates
from moe_engine.worker.kv_cache.kv_pool import KVPool
from moe_engine.worker.kv_cache.state_pool import StatePool
from moe_engine.worker.kv_cache.storage_io import StorageIO
from moe_engine.worker.options import WorkerOptions

CACHE_VERSION = 1
"""Version; changes whenever the engine computes other bytes for the same tokens, or orders them differently."""


@dataclass(frozen=True)
class Share:
    """A rank's part of each token's KV: `index` of `count`. `writes`: this is the first rank with the part."""

    index: int
    count: int
    writes: bool


def share_of(options: WorkerOptions, parallel: ParallelContext) -> Share:
    """The share of a rank. Every rank has all of MLA's latent; KV heads are divided, and replicated if there are more
    ranks than heads. With an EAGLE head: the common division of model and head."""
    size, rank = parallel.attn_tp_size, parallel.attn_tp_rank
    layers = [options.model, *([] if options.draft_head is None else [options.draft_head.layer])]
    count = math.lcm(*(_num_shares(layer, options.kv_dtype, parallel) for layer in layers))
    return Share(rank * count // size, count, rank * count % size == 0)


def _num_shares(model: ModelConfig, kv_dtype: str, parallel: ParallelContext) -> int:
    local, size = local_config(model, parallel), parallel.attn_tp_size
    pairs = zip(model.attentions, local.attentions)
    parts = [both for a, b in pairs for both in zip(a.kv_parts(kv_dtype), b.kv_parts(kv_dtype))]
    ratios = {_numbers(whole) / _numbers(part) for whole, part in parts}
    ratio = ratios.pop() if len(ratios) == 1 else 0.0
    return int(ratio) if ratio == int(ratio) and ratio and size % int(ratio) == 0 else size


def _numbers(part: tuple[int, ...]) -> int:
    product = 1
    for dim in part:
        product *= dim
    return product


def schema_of(options: WorkerOptions, pool: KVPool, share: Share) -> str:
    """Hash of everything that changes the bytes of a page on this rank, in addition to its tokens: 32 hex digits.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    facts = (
        CACHE_VERSION,
        _weights(options),
        repr(options.model),
        options.dtype,
        options.kv_dtype,
        pool.page_size,
        pool.schema(),
        (share.index, share.count),
        options.speculation.method if options.speculation is not None else "",
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _weights(options: WorkerOptions) -> tuple[str, ...]:
    drafts = (options.speculation.draft_model_path if options.speculation is not None else None) or ""
    if options.load_format == "dummy":
        return ("dummy", str(options.dummy_seed), drafts)
    try:
        return tuple(fingerprint_of(path) for path in (options.model_path, drafts) if path)
    except OSError as error:
        raise ConfigError(f"--hicache-storage-backend: the checkpoint cannot be read: {error}") from error


def make_copies(
    options: WorkerOptions,
    pool: KVPool,
    parallel: ParallelContext,
    stream: DeviceStream,
    states: StatePool | None,
    storage: PageStorage | None,
) -> Any:
    """An instance of `copies_class`.

    Args:
        storage: of `options.storage`, opened.

    Raises:
        ConfigError: the connector has no storage.
    """
    made = copies_class(options.kv_connector)
    more: dict[str, Any] = {}
    if options.hicache_mem_layout != "page_first":
        more["layout"] = options.hicache_mem_layout
    if options.hicache_io_backend == "kernel":
        more["staged"] = True
    host_states = None
    if states is not None:
        more["states"] = host_states = HostStates(options.host_snapshots, states, stream)
    if options.host_window_slots:
        more["num_window_slots"] = options.host_window_slots
    copies = made(pool, options.host_tier_tokens, stream, **more)
    if storage is None:
        return copies
    if not hasattr(copies, "host"):
        raise ConfigError(f"--hicache-storage-backend: --kv-connector {options.kv_connector} has no host memory for it")
    share = share_of(options, parallel)
    page_bytes = pool.page_size * copies.host.width
    schema = schema_of(options, pool, share)
    pages, stored_states = SealedPages(storage, schema, page_bytes), None
    if host_states is not None:
        # another name than that of the page: every rank has states of its own, also where it shares KV heads
        own = f"{schema}-state-{parallel.attn_tp_rank}of{parallel.attn_tp_size}"
        stored_states = host_states, SealedPages(storage, own, host_states.each_bytes)
    copies.storage = StorageIO(copies.host, pages, pool.page_size, writes=share.writes, states=stored_states)
    return copies
