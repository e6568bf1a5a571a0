"""Configuration of the scheduler, resolved by the engine before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.errors import ConfigError
from moe_engine.kv_connectors import SIDES
from moe_engine.types import SpeculationConfig
from moe_engine.types.prefill_delay import DelayerSettings
from moe_engine.types.step_settings import StorageSettings

POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "priority")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits, budgets and policy of one rank's scheduler.

    A field with the name of a flag has that flag's value (`planning.output.scheduler_limits.scheduler_config`).

    `num_slots` is the size of the KV pool in tokens (flag ``--max-total-tokens``, or by memory), without the dummy
    page. `chunked_prefill_size` -1 disables chunking. Constants at the end are SGLang's; change them in tests.

    Raises:
        ConfigError: naming the flag, for invalid values.
    """

    num_slots: int
    context_len: int
    page_size: int = 1
    max_rows: int = 256
    """Max running requests (``--max-running-requests``)."""
    policy: str = "fcfs"
    chunked_prefill_size: int = 8192
    max_prefill_tokens: int = 16384
    max_step_tokens: int | None = None
    """Max tokens of any step: the limit of worker, dispatcher and buffers. None: the other fields determine it."""
    enable_mixed_chunk: bool = False
    schedule_conservativeness: float = 1.0
    disable_radix_cache: bool = False
    radix_eviction_policy: str = "lru"
    radix_eviction_policy_config: str = "{}"
    uses_priority: bool = False
    """Whether the priority of requests has an effect; so it has with the policy ``priority``."""
    schedule_low_priority_values_first: bool = False
    priority_preemption_threshold: int = 10
    disable_priority_preemption: bool = False
    default_priority_value: int | None = None
    max_queued_requests: int | None = None
    prefill_max_requests: int | None = None
    request_waiting_timeout: float | None = None
    request_running_timeout: float | None = None
    """Time limits of a request, in seconds (`request_timeouts.py`); None: none."""
    vocab_size: int | None = None
    """Sampled ids outside [0, vocab_size) abort their request; None checks only for negative ids."""
    random_seed: int = 0
    speculation: SpeculationConfig | None = None
    host_tier_tokens: int = 0
    """Size of the host-RAM tier (``--enable-hierarchical-cache``); 0: none."""
    kv_connector: str = "host"
    """Class of the tier (`moe_engine.kv_connectors`)."""
    hicache_write_policy: str = "write_back"
    """When KV is stored there (``--hicache-write-policy``, resolved)."""
    storage: StorageSettings | None = None
    """Storage below the tier; None: none."""
    kv_events: bool = False
    """Whether the radix cache collects events (``--kv-events-config``)."""
    window: int = 0
    """Tokens that windowed layers attend to, the query's included, if their KV is bounded; 0: it is not."""
    num_window_slots: int = 0
    """Size of the pool of windowed layers in tokens, without the dummy page (`types.window_pool_tokens`)."""
    host_window_slots: int = 0
    """Size of the window pool of the host-RAM tier in tokens."""
    num_snapshots: int = 0
    """Snapshots of states in the prefix cache (``--max-mamba-cache-size``); 0: none, or a model without states."""
    host_snapshots: int = 0
    """States that the host-RAM tier can hold."""
    mamba_track_interval: int = 256
    """Tokens between two snapshots of a decoding request."""
    lora_slots: int = 0
    """Different LoRA adapters of one batch (``--max-loras-per-batch``); 0: no LoRA."""
    jump_forward: bool = False
    """Whether forced tokens of a grammar take one step together (`scheduler/jump_forward.py`)."""
    session_hold: float | None = None
    """Longest wait of a request for sessions whose KV is held (`session_hold.py`), in seconds; None: as long as their
    rotation takes; 0: no KV is held."""
    autopilot: bool = False
    """Whether the run settings follow the load (`scheduler/autopilot`)."""
    ttft_slo: float | None = None
    itl_slo: float | None = None
    """Targets of the autopilot (``--slo``), in seconds."""
    max_consecutive_prefills: int = 32
    """Max prefill-only steps in a row; then running requests get a decode step even if prompts still wait."""
    max_delayed_tokens: int | None = None
    """Max prompt tokens of a prefill-only step times the requests whose next token waits for it; `least_chunk` tokens
    are always allowed, as smaller steps cost much more for each token. None: no limit."""
    least_chunk: int = 256
    prefill_decode_interval: int = 0
    prefill_decode_interval_min_bs: int = 0
    """Decode steps behind each step with prompts, and the running requests from which on they are kept; 0: none."""
    delayer: DelayerSettings | None = None
    """``--enable-prefill-delayer``; None: off."""
    whole_images: bool = False
    """Whether no chunk may end inside an image, whose tokens attend to later ones; with a page size of 1."""

    init_new_token_ratio: float = 0.7
    min_new_token_ratio_factor: float = 0.14
    new_token_ratio_decay_steps: int = 600
    retract_decode_steps: int = 20
    clip_max_new_tokens: int = 4096
    lpm_fallback_queue: int = 128
    in_batch_check_threshold: int = 32
    in_batch_deprioritize_threshold: int = 32
    max_overtakes: int = 512
    """See waiting_queue.py: how often a policy other than fcfs may admit other requests before a waiting request."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_priorities()
        self._check_caches()
        self._check_limits()

    def _check_sizes(self) -> None:
        for flag, value in (
            ("--page-size", self.page_size),
            ("--max-running-requests", self.max_rows),
            ("--max-prefill-tokens", self.max_prefill_tokens),
        ):
            if value < 1:
                raise ConfigError(f"{flag} is {value}; it must be at least 1")
        if self.num_slots < self.page_size or self.num_slots % self.page_size:
            raise ConfigError(
                f"the KV pool has {self.num_slots} tokens, not a positive multiple of --page-size {self.page_size}; "
                "set --max-total-tokens to a multiple or lower --page-size"
            )
        if self.whole_images and self.page_size != 1:
            raise ConfigError(
                f"--page-size is {self.page_size}, but the tokens of an image attend to all of the image, which a page "
                "would cut; give --page-size 1"
            )
        if self.chunked_prefill_size != -1 and self.chunked_prefill_size < self.page_size:
            raise ConfigError(
                f"--chunked-prefill-size is {self.chunked_prefill_size}, below --page-size {self.page_size}; "
                "raise it, or set -1 to disable chunking"
            )
        if self.max_step_tokens is not None and self.max_step_tokens < max(self.decode_tokens, self.page_size):
            raise ConfigError(
                f"steps of at most {self.max_step_tokens} tokens must have room for a page (--page-size "
                f"{self.page_size}) and for the {self.decode_tokens} decode tokens of --max-running-requests "
                f"{self.max_rows}; lower these"
            )

    def _check_priorities(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"--schedule-policy is {self.policy!r}; choose one of {', '.join(POLICIES)}")
        if self.uses_priority and self.policy not in ("fcfs", "lof", "priority"):
            raise ConfigError(
                f"--enable-priority-scheduling needs --schedule-policy fcfs, lof or priority, not {self.policy}"
            )
        if self.policy == "priority" and not self.uses_priority:
            raise ConfigError("--schedule-policy priority is an order by priority")

    def _check_caches(self) -> None:
        if self.host_tier_tokens and self.disable_radix_cache:
            raise ConfigError("--enable-hierarchical-cache needs the radix cache; give no --disable-radix-cache")
        if self.window and (self.num_window_slots % self.page_size or self.host_window_slots % self.page_size):
            raise ConfigError("a bounded window needs a pool of whole pages")
        plain = self.kv_connector == "host" and self.storage is None and self.host_window_slots > 0
        if self.window and self.host_tier_tokens and not plain:
            raise ConfigError(
                "a bounded window needs the host-RAM tier as KV connector, with window pages of its own and no storage"
            )
        if self.num_snapshots and (self.window or self.disable_radix_cache):
            raise ConfigError("snapshots of states need the radix cache, without bounded windows")
        keeps_states = self.host_snapshots and self.kv_connector in ("host", *SIDES)
        if self.num_snapshots and self.host_tier_tokens and not keeps_states:
            raise ConfigError("snapshots of states need the host-RAM tier as KV connector, with states of its own")

    def _check_limits(self) -> None:
        for flag, value in (
            ("--max-queued-requests", self.max_queued_requests),
            ("--prefill-max-requests", self.prefill_max_requests),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} is {value}; it must be at least 1, or left out")
        for flag, limit in (
            ("--request-waiting-timeout", self.request_waiting_timeout),
            ("--request-running-timeout", self.request_running_timeout),
        ):
            if limit is not None and limit <= 0:
                raise ConfigError(f"{flag} is {limit:g}; it must be more than 0 seconds, or left out for no limit")

    @property
    def decode_tokens(self) -> int:
        """Max tokens of a decode step, drafts included."""
        return self.max_rows * (self.speculation.num_draft_tokens if self.speculation is not None else 1)

    @property
    def chunk_tokens(self) -> int | None:
        """Max tokens of a step with prompts; longer prompts are chunked. None: prompts are never chunked."""
        sizes = [self.chunked_prefill_size if self.chunked_prefill_size > 0 else None, self.max_step_tokens]
        return min((size for size in sizes if size is not None), default=None)

    @property
    def bigram_prefixes(self) -> bool:
        """Whether the radix cache is keyed by pairs of tokens: the KV that MTP layers and EAGLE heads
        have of a token also depends on its successor."""
        return self.speculation is not None and self.speculation.reads_next_token

    @property
    def preempts(self) -> bool:
        """Whether a waiting request may preempt a running one."""
        return self.uses_priority and not self.disable_priority_preemption

    @property
    def delays_prefills(self) -> bool:
        """Whether prompts may have to wait for a step (`prefill_delays.py`)."""
        return self.prefill_decode_interval > 0 or self.delayer is not None

    @property
    def effective_policy(self) -> str:
        """`effective_order` of the launch."""
        return self.effective_order(self.policy)

    def effective_order(self, policy: str) -> str:
        """The order within one priority. Cache-aware policies fall back to fcfs if the radix cache is disabled."""
        if policy == "priority" or (self.disable_radix_cache and policy in ("lpm", "dfs-weight")):
            return "fcfs"
        return policy

    def ceil_page(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size

    def floor_page(self, tokens: int) -> int:
        return tokens - tokens % self.page_size

    def priority_key(self, priority: int | None) -> float:
        """Smaller is more urgent; a request without a priority is the least urgent, unless there is a default."""
        if priority is None:
            priority = self.default_priority_value
        if priority is None:
            return float("inf")
        return priority if self.schedule_low_priority_values_first else -priority
