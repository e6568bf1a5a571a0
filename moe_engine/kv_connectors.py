"""KV connectors by name (`--kv-connector`): tiers and transports of KV outside the pool.

A connector is a class of `scheduler.kv_cache.kv_connector.KVConnector`, made with (places, slots, make_room) as
`HostTier`. Its attribute `copies` is the path of its worker side, made with (pool, places, stream) as `KVCopies`.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_engine.class_path import class_at
from moe_engine.errors import ConfigError

SIDES = {
    "prefill": "moe_engine.scheduler.tiers.prefill_tier:PrefillTier",
    "decode": "moe_engine.scheduler.tiers.decode_tier:DecodeTier",
}
"""The connectors of `--disaggregation-mode`."""
CONNECTORS = {"host": "moe_engine.scheduler.tiers.host_tier:HostTier"}
"""Name -> path of the class. Other classes are named by their path, ``package.module:Class``."""

METHODS = (
    "get_num_new_matched_tokens", "start_load", "build_connector_meta", "update_connector_output", "steps_failed",
    "reset", "held_nodes", "held_slots", "check_integrity",
)  # fmt: skip
"""Methods of `KVConnector`."""
WORKER_METHODS = ("start", "take_done", "end_all", "close")
"""Methods of the worker side."""


def connector_class(name: str) -> type[Any]:
    """The scheduler side.

    Raises:
        ConfigError: unknown name, or a path without such a class.
    """
    found: type[Any] = class_at((CONNECTORS | SIDES).get(name, name), "--kv-connector", CONNECTORS)
    _check(found, METHODS)
    if not isinstance(getattr(found, "copies", None), str):
        raise ConfigError(f"--kv-connector: {found.__name__} has no attribute copies, the path of its worker side")
    return found


def copies_class(name: str) -> Callable[..., Any]:
    """The worker side. Raises ConfigError: as `connector_class`."""
    found: type[Any] = class_at(connector_class(name).copies, "--kv-connector", CONNECTORS)
    _check(found, WORKER_METHODS)
    return found


def _check(found: type[Any], methods: tuple[str, ...]) -> None:
    if not isinstance(found, type):
        raise ConfigError(f"--kv-connector {found!r:.100}: not a class")
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(f"--kv-connector: {found.__name__} has no method {', '.join(missing)}")
