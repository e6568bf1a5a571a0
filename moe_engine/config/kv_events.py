"""`--kv-events-config`: its JSON object, with vLLM's and SGLang's keys."""

from __future__ import annotations

import re

import msgspec

from moe_engine.errors import ConfigError

FLAG = "--kv-events-config"


class KVEventsConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`endpoint` and `replay_endpoint`: addresses to bind, as tcp://*:5557; attention group i uses the port + i.
    `buffer_steps`: batches kept for replays. `hwm`, `max_queue_size`: batches that may wait for a subscriber, and for
    the publisher's thread."""

    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    enable_kv_cache_events: bool = True

    def endpoint_of(self, address: str, rank: int) -> str:
        """The address of an attention group."""
        match = re.fullmatch(r"(tcp://.*:)(\d+)", address)
        if match is None:
            return address if rank == 0 else f"{address}-{rank}"
        port = int(match[2])
        return match[1] + str(port + rank if port else 0)


def parse_kv_events(text: str | None) -> KVEventsConfig | None:
    """None if events are off.

    Raises:
        ConfigError: the text is not such an object.
    """
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.MsgspecError as error:
        example = '\'{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
        raise ConfigError(f"{FLAG} {text!r:.100}: {error}; example: {example}") from None
    if config.publisher not in ("zmq", "null"):
        raise ConfigError(f"{FLAG}: publisher {config.publisher!r}: zmq or null")
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{FLAG}: {name} {getattr(config, name)}: at least 1")
    for name in ("endpoint", "replay_endpoint"):
        address = getattr(config, name)
        if address is not None and not re.fullmatch(r"tcp://.+:\d{1,5}|ipc://.+", address):
            raise ConfigError(f"{FLAG}: {name} {address!r}: an address to bind, as tcp://*:5557")
    return config if config.publisher == "zmq" and config.enable_kv_cache_events else None
