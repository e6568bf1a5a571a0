"""Flags of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.config.values import parse_count, parse_json_object

MORE_POLICIES = "more schedule policies"
CACHE_AWARE_POLICIES = ("lpm", "dfs-weight")


@dataclass(frozen=True)
class SchedulingArgs:
    schedule_policy: str = flag(
        "fcfs",
        "Order of the waiting queue. fcfs: arrival; lpm: longest cached prefix first; dfs-weight: by weight of the "
        "prefix tree; lof: longest max_new_tokens first; random: shuffled every step; priority: by the requests' "
        "priority.",
        choices=("fcfs", "lpm", "dfs-weight", "lof", "random", "priority"),
        unsupported=dict.fromkeys(("routing-key", "hrrn", "shortest-prefill-first"), MORE_POLICIES),
    )
    workload_profile: str | None = flag(
        None,
        "Sets the values that tuning guides recommend for a kind of load, for flags not given: low-latency, "
        "throughput, long-context or multi-turn. `moe-engine plan` shows each choice with its reason. Left out: none.",
        choices=("low-latency", "throughput", "long-context", "multi-turn"),
    )
    autopilot: bool = flag(
        False,
        "Adapt settings to the load while serving: running requests, prefill chunks, conservativeness, schedule "
        "policy, interval of EPLB. Each change is measured, logged, and undone if it does not help.",
    )
    slo: str | None = flag(
        None,
        "Limits that --autopilot and `moe-engine plan` aim at: ttft=2s,itl=50ms (time to first token; gap between "
        "tokens). Left out: throughput where requests wait, latency elsewhere.",
        metavar="TEXT",
    )
    session_hold: float | None = flag(
        None,
        "Longest wait, in seconds, of a request that could only run by evicting the KV of sessions whose next turn "
        "is expected. Left out: until such evictions cost at most 2.5% of the time. 0: no KV is held for sessions. "
        "No effect with --hicache-storage-backend.",
        metavar="SECONDS",
    )
    schedule_conservativeness: float = flag(
        1.0,
        "Above 1 admits fewer requests (fewer retractions when the KV cache is full), below 1 more. Scales the share "
        "of max_new_tokens that is reserved on admission (0.7 at first).",
        metavar="FACTOR",
    )
    enable_mixed_chunk: bool = flag(False, "Mix decodes of running requests with a prefill chunk in one step.")
    disable_overlap_schedule: bool = flag(
        False, "Schedule a step only after the previous one has finished. Slower; for debugging."
    )
    disable_radix_cache: bool = flag(False, "Disable the radix cache (prefix cache): no prompt prefix is reused.")
    radix_eviction_policy: str = flag(
        "lru",
        "Which KV leaves the radix cache and the host-RAM tier first. lru: used longest ago; lfu: used least often; "
        "slru: used only once; priority: of the least urgent requests; tlru: the end of long conversations, as far "
        "as the next turn can compute it in time. Ties: used longest ago.",
        choices=("lru", "lfu", "slru", "priority", "tlru"),
    )
    radix_eviction_policy_config: str = flag(
        "{}",
        "JSON object with parameters of --radix-eviction-policy. slru: protected_threshold (2 uses). tlru: threshold "
        "(tokens that a turn can compute in time) and next_prompt_estimate (tokens that a turn adds).",
        metavar="JSON",
        parse=parse_json_object,
    )
    enable_priority_scheduling: bool = flag(
        False, "Order the waiting queue by request priority first; larger is more urgent. Works with fcfs and lof."
    )
    schedule_low_priority_values_first: bool = flag(False, "With priority scheduling: smaller numbers are more urgent.")
    priority_scheduling_preemption_threshold: int = flag(
        10, "A waiting request preempts a running one if its priority is better by more than this.", metavar="N"
    )
    disable_priority_preemption: bool = flag(
        False, "With priority scheduling: a waiting request never preempts a running one."
    )
    default_priority_value: int | None = flag(
        None,
        "With priority scheduling: priority of requests without one. Left out: such requests are the least urgent.",
        metavar="N",
    )
    abort_on_priority_when_disabled: bool = flag(
        False, "Refuse requests with a `priority` while priority scheduling is off. Otherwise the field has no effect."
    )
    max_queued_requests: int | None = flag(
        None, "Max length of the waiting queue; further requests get status 503. Left out: no limit.", metavar="N"
    )
    request_waiting_timeout: float | None = flag(
        None,
        "Max time in the waiting queue, before the first step; then the request gets status 503 "
        "(SGLANG_REQ_WAITING_TIMEOUT in SGLang). Left out: no limit.",
        metavar="SECONDS",
    )
    request_running_timeout: float | None = flag(
        None,
        "Max time from a request's first step to its end; then it gets status 503, or an error event in its stream "
        "(SGLANG_REQ_RUNNING_TIMEOUT in SGLang). Left out: no limit.",
        metavar="SECONDS",
    )
    prefill_max_requests: int | None = flag(None, "Max prompts started in one step. Left out: no limit.", metavar="N")
    prefill_decode_interval: int = flag(
        0,
        "Decode steps between two steps with prompts, while requests decode. 0: no fixed number.",
        metavar="STEPS",
    )  # fmt: skip
    prefill_decode_interval_min_bs: int = flag(
        0, "Number of decoding requests from which --prefill-decode-interval applies.", metavar="N"
    )
    enable_prefill_delayer: bool = flag(
        False,
        "Delay prompts until they can share a step: until all attention groups have prompts, and a prefill batch of "
        "the usual size has free rows. Running requests are interrupted less often, first tokens come later.",
    )
    prefill_delayer_max_delay_passes: int = flag(
        30, "Most steps that --enable-prefill-delayer delays prompts, plus one.", metavar="STEPS"
    )
    prefill_delayer_token_usage_low_watermark: float | None = flag(
        None,
        "Share of its KV pool below which a group with prompts is not delayed by --enable-prefill-delayer. Left "
        "out: no such limit.",
        metavar="SHARE",
    )
    prefill_delayer_queue_min_ratio: float | None = flag(
        None,
        "With --enable-prefill-delayer: prompts also wait until there are as many as this share of the running "
        "requests, at most a usual prefill batch (--prefill-max-requests). Left out: no such wait.",
        metavar="SHARE",
    )
    prefill_delayer_max_delay_ms: float | None = flag(
        None, "Longest wait by --prefill-delayer-queue-min-ratio, in milliseconds. Left out: 5000.", metavar="MS"
    )
    prefill_delayer_forward_passes_buckets: str | None = flag(
        None,
        "Upper bounds of the histogram of --enable-prefill-delayer's delays in steps, rising. Left out: SGLang's.",
        many=True,
        metavar="STEPS",
    )
    prefill_delayer_wait_seconds_buckets: str | None = flag(
        None,
        "Upper bounds of the histogram of --enable-prefill-delayer's delays in seconds, rising. Left out: SGLang's.",
        many=True,
        metavar="SECONDS",
    )
    stream_interval: int = flag(
        1, "Tokens per chunk of a streamed answer. Larger values save host work.", metavar="TOKENS",
        parse=parse_count,
    )  # fmt: skip

    @property
    def uses_priority(self) -> bool:
        """Whether the priority of requests has an effect."""
        return self.enable_priority_scheduling or self.schedule_policy == "priority"
