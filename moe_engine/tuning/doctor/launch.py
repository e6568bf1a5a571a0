"""Facts that a log or a server reports about its launch: flags, sizes, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moe_engine.tuning.doctor.log_lines import LogEvent

SIXTEEN_BIT = ("bfloat16", "float16")


@dataclass
class Launch:
    """Facts that become known line by line. Sizes are GB (2^30 bytes) of one GPU, None: not reported.

    Attributes:
        flags: those of the server_args line, or of /server_info: resolved values by name.
        engine: ``moe-engine`` or ``sglang``, whose flags differ in spelling.
        total_gb: free memory before the weights were loaded, nearly the GPU's.
    """

    flags: dict[str, Any] = field(default_factory=dict)
    engine: str = "sglang"
    ready: bool = False
    total_gb: float | None = None
    weights_gb: float | None = None
    kv_gb: float | None = None
    kv_tokens: int | None = None
    kv_dtype: str | None = None
    available_gb: float | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    """Values of the start-up summary: max_running_requests, chunked_prefill_size, ..."""

    def take(self, event: LogEvent) -> None:
        """Adds an event of the start; other events are ignored."""
        values = event.values
        if event.kind == "startup":
            self.sizes = values
            self.available_gb = values.get("available_gpu_mem")
        elif event.kind == "server_args":
            self.flags = values
        elif event.kind == "weights":
            self.total_gb = max(self.total_gb or 0.0, values["available"])
            self.weights_gb = values["used"] or self.weights_gb
        elif event.kind == "kv_cache":
            self.kv_dtype, self.kv_tokens, self.kv_gb = values["dtype"], values["tokens"], values["gb"]
        elif event.kind == "ledger":
            self.engine = "moe-engine"
        elif event.kind == "ready":
            self.ready = True

    def flag(self, name: str, *others: str) -> Any:
        """Value of a flag by its name or an older one; None: unknown, or not set."""
        found = (self.flags.get(word, self.sizes.get(word)) for word in (name, *others))
        return next((value for value in found if value is not None), None)

    @property
    def is_starting(self) -> bool:
        """Whether lines of the start were read, and not its end."""
        return not self.ready and (bool(self.flags) or self.total_gb is not None)

    @property
    def is_ours(self) -> bool:
        return self.engine == "moe-engine"

    @property
    def on_gpu(self) -> bool:
        """False if the flags name the CPU, where no memory is fixed and no graph is captured."""
        return self.flag("device") != "cpu"

    @property
    def has_16_bit_kv(self) -> bool | None:
        dtype = self.kv_dtype or self.flag("kv_cache_dtype")
        return None if dtype is None else dtype in SIXTEEN_BIT or dtype == "auto"

    @property
    def bytes_per_token(self) -> float | None:
        """KV of one token."""
        return self.kv_gb * 2**30 / self.kv_tokens if self.kv_gb and self.kv_tokens else None
