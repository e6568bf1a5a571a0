"""Facts that a log or a server reports about its launch: flags, sizes, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from moe_engine.tuning.doctor.log_lines import LogEvent

SIXTEEN_BIT = ("bfloat16", "bf16", "float16")
Shared = Literal["max_running_requests", "chunked_prefill_size"]
SHARED: tuple[Shared, ...] = get_args(Shared)
"""Flags whose values attention DP ranks share."""
DP_CONSERVATIVENESS = 0.3
"""With DP attention both engines multiply --schedule-conservativeness by this at the start."""


@dataclass
class Launch:
    """Facts that become known line by line. Sizes are GB (2^30 bytes) of one GPU, None: not reported.

    Attributes:
        flags: those of the server_args line, or of /server_info: resolved values by name.
        engine: ``moe-engine`` or ``sglang``, whose flags differ in spelling.
        flags_as_given: `flags` are those of the command line; False: those of a log's server_args line, in which
            attention DP ranks have divided the prefill chunk and reduced the conservativeness.
        has_loaded: the weights are in memory.
        has_transfers: batch lines count requests whose KV is sent to a decode server.
        total_gb: free memory before the weights were loaded, nearly the GPU's.
    """

    flags: dict[str, Any] = field(default_factory=dict)
    engine: str = "sglang"
    flags_as_given: bool = False
    ready: bool = False
    has_loaded: bool = False
    has_transfers: bool = False
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
            if self.ready:
                self._restart()
            self.flags = values
            self.engine = "moe-engine" if "attn_dp_size" in values else "sglang"
        elif event.kind == "weights":
            self.total_gb = max(self.total_gb or 0.0, values["available"])
            self.weights_gb = max(values["used"] or 0.0, self.weights_gb or 0.0) or None  # a drafter has fewer
            self.has_loaded = self.weights_gb is not None
        elif event.kind == "kv_cache":
            self.has_loaded = True
            if values["gb"] >= (self.kv_gb or 0.0):  # the pool of a drafter is smaller
                self.kv_dtype, self.kv_tokens, self.kv_gb = values["dtype"], values["tokens"], values["gb"]
        elif event.kind == "out_of_memory":
            self.has_loaded |= values["after_loading"]
        elif event.kind == "prefill":
            self.has_transfers |= "transfers" in values
        elif event.kind == "ledger":
            self.engine = "moe-engine"
        elif event.kind == "ready":
            self.ready = True

    def _restart(self) -> None:
        """The log goes on with another start."""
        self.ready = self.has_loaded = self.has_transfers = False
        self.total_gb = self.weights_gb = self.kv_gb = self.available_gb = None
        self.kv_tokens = self.kv_dtype = None
        self.sizes = {}

    def flag(self, name: str, *others: str) -> Any:
        """Value of a flag by its name or an older one; None: unknown, or not set."""
        for word in (name, *others):
            if (value := self.flags.get(word, self.sizes.get(word))) is not None:
                return value
        return None

    @property
    def attention_ranks(self) -> int:
        """Attention DP ranks, which share the running requests and the prefill chunk of the command line."""
        if self.is_ours:
            return self.flag("attn_dp_size") or 1
        return (self.flag("dp_size") or 1) if self.flag("enable_dp_attention") else 1

    def of_rank(self, name: Shared) -> int | None:
        """Value for one attention DP rank, as batch lines show it."""
        if (known := self.sizes.get(name)) is not None or (value := self.flag(name)) is None:
            return known
        is_divided = not self.flags_as_given and (self.is_ours or name == "chunked_prefill_size")
        return value if is_divided or value < 0 else max(1, value // self.attention_ranks)

    @property
    def conservativeness(self) -> float:
        """--schedule-conservativeness, as given."""
        value = self.flag("schedule_conservativeness") or 1.0
        reduced = not self.flags_as_given and self.attention_ranks > 1
        return round(value / DP_CONSERVATIVENESS, 3) if reduced else value

    @property
    def is_starting(self) -> bool:
        """Whether lines of the start were read, and not its end."""
        return not self.ready and (bool(self.flags) or self.total_gb is not None)

    @property
    def only_prefills(self) -> bool:
        """A prefill server, or one of embeddings: no request decodes."""
        mode = self.flag("disaggregation_mode")
        return mode == "prefill" or bool(self.flag("is_embedding")) or (mode is None and self.has_transfers)

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
