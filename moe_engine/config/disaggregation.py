"""Flags of prefill and decode on separate servers."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag

OFF = "null"


@dataclass(frozen=True)
class DisaggregationArgs:
    disaggregation_mode: str = flag(
        OFF,
        "Prefill and decode on separate servers: prefill, or decode. Requests with bootstrap_room are prefilled on one "
        "server, and their KV moves to the other. null: one server does both.",
        choices=(OFF, "prefill", "decode"),
    )
    disaggregation_bootstrap_port: int = flag(
        8998,
        "Port at which a prefill server accepts decode servers; of a decode server the port of prefill servers whose "
        "requests name none.",
        metavar="PORT",
    )
    disaggregation_transfer_backend: str = flag(
        "tcp",
        "Transport of the KV. tcp: ZeroMQ over TCP, through host memory. The others are not available yet.",
        choices=("tcp", "mooncake", "nixl", "ascend", "mori", "fake"),
    )
