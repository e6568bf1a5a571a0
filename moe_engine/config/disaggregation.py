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
        "Port at which a prefill server accepts decode servers. On a decode server: the port of prefill servers for "
        "requests that name none.",
        metavar="PORT",
    )
    disaggregation_transfer_backend: str = flag(
        "tcp",
        "Transport of the KV, the same on both sides. tcp: over ZeroMQ. shm: shared memory of one machine. nixl: NIXL "
        "with UCX. mooncake: Mooncake's transfer engine, over RDMA if available, else TCP; mooncake_tcp: TCP.",
        choices=("tcp", "shm", "nixl", "mooncake", "mooncake_tcp", "ascend", "mori", "fake"),
    )
    disaggregation_ib_device: str | None = flag(
        None,
        "RDMA devices of --disaggregation-transfer-backend mooncake: mlx5_0, or several as mlx5_0,mlx5_1. Left out: "
        "Mooncake chooses.",
        metavar="NAMES",
    )


TRANSPORT_LIBRARIES = {
    "nixl": ("nixl", "nixl"),
    "mooncake": ("mooncake", "mooncake"),
    "mooncake_tcp": ("mooncake", "mooncake"),
}
"""Transport -> (module, extra of pyproject.toml)."""
REFUSED_TRANSPORTS = ("ascend", "mori", "fake")
