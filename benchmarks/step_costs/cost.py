"""Work of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cost:
    """Work of one launch. Bytes are of device memory; `flops` by dtype (``bf16``, ``fp8``, ``fp32``).

    nvlink, network: bytes that this rank sends. link_us: latency of a message in addition to its bytes, or the whole
    time if it was measured. travel_us: time from the end of the launch until its messages have arrived at other ranks.
    awaits: the launch works when the messages sent last have arrived. launches: kernels that a library starts for the
    call. empty_us: time of programs without work, in addition to everything else. programs: number of programs that
    read, where they may be too few for the device's rate; None: enough. weights: address of the memory of
    the launch's weights (`memory_of`). prefetched: bytes that it requests for the L2 cache, by address. requests_own:
    bytes of its weights that it requests before it waits for its inputs. requests_last: it requests `prefetched` at its
    end, not at its start.
    """

    read: float = 0
    written: float = 0
    flops: Mapping[str, float] = field(default_factory=dict)
    nvlink: float = 0
    network: float = 0
    link_us: float = 0
    travel_us: float = 0
    awaits: bool = False
    launches: int = 1
    empty_us: float = 0
    programs: int | None = None
    weights: int = 0
    prefetched: Mapping[int, float] = field(default_factory=dict)
    requests_own: float = 0
    requests_last: bool = False

    @property
    def bytes(self) -> float:
        return self.read + self.written

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())
