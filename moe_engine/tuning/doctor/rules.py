"""The rules of the tuning guides: one table. `RULES` is evaluated by `diagnosis`.

A rule's texts are templates over `Statistics` (as ``{usage:.2f}``); `change` gives the flag's new value.
Sources: SGLang's guide "Hyperparameter Tuning" (guide), measurements of this engine and published incidents (ours).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from moe_engine.tuning.doctor.window import MAX_SMALL_BATCH, ROOM, Statistics

GUIDE = "SGLang, Hyperparameter Tuning"
OURS = "moe-engine, docs/tuning.md"

MAX_QUEUE = 2000
OFTEN = 0.5
"""Share of lines from which "frequently" of the guide is meant."""
WAITING = 0.1
"""Requests in the queue, as a share of the running ones, above which they wait for more than the next prefill step."""
FEW_RETRACTIONS = 1.0
"""A minute; the guide accepts about one."""
MIN_FREE_GB, MAX_FREE_GB = 5.0, 8.0
FREE_GOAL_GB = 6.5
CONSERVATIVE, LESS_CONSERVATIVE = 1.3, 0.3
FULL = 0.95
IDLE_USAGE = 0.5
IDLE_REQUESTS = 0.5
"""Share of the running requests allowed below which the server has room for more."""
SHARED_PREFIXES = 0.1
"""Hit rate above which the requests are regarded as sharing prefixes."""
GOOD_HIT_RATE = 0.8
LPM_QUEUE = 128
"""Requests in the queue above which lpm behaves as fcfs."""
NEARLY = 4
"""Limits above this count as reached by one request fewer: SGLang keeps a row for the prompt in chunks."""
LONG_RUN = 4
"""Full chunks from which on a prompt is long."""
STALLS = 0.2
"""Share of prefill lines above which chunks during running requests are not an exception."""
LARGEST_CHUNK = 16384
PAGED_BACKENDS = (
    "nsa", "dsa", "flashmla", "cutlass_mla", "trtllm_mla", "tokenspeed_mla", "trtllm_mha", "fa4", "ascend",
)  # fmt: skip
"""SGLang's attention backends that prescribe the page size."""
POOL_RATIOS = {"swa_usage": ("swa_full_tokens_ratio", 0.8, 1.0), "mamba_usage": ("mamba_full_memory_ratio", 0.9, 8.0)}
"""SGLang's size of a pool relative to that of full attention, by the pool: flag, default, largest value."""
LARGEST_FRACTION = 0.95
POOR_BALANCE = 0.7
POOR_DRAFTS = 1.3
"""Tokens a request and step, below which drafts cost more than they save."""
DRAFT_COST = 0.15
"""Cost of a draft step, with its share of the verification, in plain steps: the low end of published MTP layers."""
UNBALANCED = 1.5
DP_WEIGHTS = 0.5
"""Share of a GPU's memory that a whole copy of the weights may take so that data parallelism leaves room for KV."""


@dataclass(frozen=True)
class Change:
    """A flag's new value. `value` None: leave the flag out; `flag` "": no flag, `effect` names the action."""

    flag: str
    value: Any = None


@dataclass(frozen=True)
class Rule:
    """
    Args:
        needs: fields of `Statistics` without which the rule cannot be evaluated.
        holds: the guide's condition, of `Statistics` in which these fields are known.
        evidence: template over the statistics.
        line: key in `Statistics.lines` of a line that shows it.
        change: the flag and its value.
        effect: the effect of the change.
        severity: ``info`` does not count for the exit code.
    """

    name: str
    condition: str
    needs: tuple[str, ...]
    holds: Callable[[Any], bool]
    evidence: str
    line: str
    change: Callable[[Statistics], Change]
    effect: str
    source: str
    severity: Literal["info", "warning", "error"] = "warning"


def _fraction(s: Statistics) -> Change:
    """--mem-fraction-static that leaves `FREE_GOAL_GB`."""
    current, total = s.launch.flag("mem_fraction_static"), s.launch.total_gb
    spare = (s.launch.available_gb or 0.0) - FREE_GOAL_GB
    if current is None or not total:
        return Change("--mem-fraction-static", "0.01 higher, repeatedly" if spare > 0 else "0.01 lower, repeatedly")
    return Change("--mem-fraction-static", round(math.floor((current + spare / total) * 100) / 100, 2))


def _free(s: Statistics) -> float:
    """GB that the fraction left free. This engine's ledger has counted the largest step, so no rule of thumb
    applies."""
    launch = s.launch
    return FREE_GOAL_GB if launch.is_ours or not launch.on_gpu or launch.available_gb is None else launch.available_gb


def _limit(s: Statistics) -> float:
    """Running requests of a rank."""
    return s.launch.of_rank("max_running_requests") or math.inf


def _at_limit(s: Any) -> bool:
    limit = _limit(s)
    return s.running >= min(FULL * limit, max(limit - 1, NEARLY))


def _is_retracting(s: Statistics) -> bool:
    return (s.retractions_a_minute or 0.0) > FEW_RETRACTIONS


def _is_decode_server(s: Statistics) -> bool:
    """SGLang's decode servers reserve --num-reserved-decode-tokens, whatever the conservativeness is."""
    return s.preallocated is not None or (not s.launch.is_ours and s.launch.flag("disaggregation_mode") == "decode")


def _waits(s: Any) -> bool:
    return s.queue >= max(1.0, WAITING * s.running)


def _more_conservative(s: Statistics) -> float:
    """The default if less is set, else 1.3 times the value."""
    current = s.launch.conservativeness
    return 1.0 if current < 1 else round(CONSERVATIVE * current, 2)


def _useful_requests(s: Any) -> int:
    """Min of the waiting requests and the requests that fill the KV cache, over the ranks."""
    of_rank = max(int(_limit(s)) + 1, int(min(s.running + s.queue, _limit(s) * ROOM / max(s.usage, 0.01))))
    return of_rank * s.launch.attention_ranks


def _fewer_requests(s: Statistics) -> Change:
    of_rank = max(1, int(0.75 * (s.max_running or min(_limit(s), 256))))
    return Change("--max-running-requests", of_rank * s.launch.attention_ranks)


def _smaller_chunk(s: Statistics) -> Change:
    chunk = s.launch.of_rank("chunked_prefill_size") or 8192
    of_rank = 4096 if chunk > 4096 else max(256, chunk // 2)
    return Change("--chunked-prefill-size", of_rank * s.launch.attention_ranks)


def _fit_at_start(s: Statistics) -> Change:
    """Before the weights are loaded, more GPUs; after that, less memory for the KV cache."""
    if not s.launch.has_loaded:
        return _more_gpus(s)
    current = s.launch.flag("mem_fraction_static")
    return Change("--mem-fraction-static", round(current - 0.05, 2) if current else "0.05 lower")


def _more_gpus(s: Statistics) -> Change:
    return Change("--tp-size", 2 * (s.launch.flag("tp_size") or 1))


def _room_for_kv(s: Statistics) -> Change:
    """SGLang's fraction counts the weights too: what they leave of it is the KV cache."""
    current = s.launch.flag("mem_fraction_static")
    if current is not None and current > LARGEST_FRACTION - 0.05:
        return _more_gpus(s)
    return Change("--mem-fraction-static", round(current + 0.05, 2) if current else "0.05 higher")


def _more_room(s: Any) -> Change:
    """A larger pool of windows if that one is full, else fewer requests."""
    flag, _, largest = POOL_RATIOS["swa_usage"]
    current = _ratio(s, "swa_usage")
    if s.short_windows and current < largest:
        return Change(f"--{flag.replace('_', '-')}", round(min(largest, 2 * current), 2))
    return _fewer_requests(s)


def _faster_prefills(s: Any) -> Change:
    """A larger chunk if steps fill it, else more servers."""
    chunk = s.launch.of_rank("chunked_prefill_size")
    mean = (s.new_per_step or 0.0) / chunk if chunk and chunk > 0 else 0.0
    return _larger_chunk(s) if mean >= FULL and chunk < LARGEST_CHUNK and not s.oom_prefill else Change("")


def _larger_chunk(s: Any) -> Change:
    of_rank = min(LARGEST_CHUNK, 2 * s.launch.of_rank("chunked_prefill_size"))
    return Change("--chunked-prefill-size", of_rank * s.launch.attention_ranks)


def _graphs(s: Statistics) -> Change:
    if s.launch.flag("disable_cuda_graph"):
        return Change("--disable-cuda-graph")
    has_new_name = s.launch.is_ours or "cuda_graph_max_bs_decode" in s.launch.flags
    flag = "--cuda-graph-max-bs-decode" if has_new_name else "--cuda-graph-max-bs"
    return Change(flag, min(MAX_SMALL_BATCH, 1 << math.ceil(math.log2(max(1.0, s.max_running or 1.0)))))


def _data_parallel(s: Statistics) -> Change:
    return Change("--dp-size", s.launch.flag("tp_size"))


def _fits_twice(s: Statistics) -> bool:
    """Tensor parallelism splits weights that one GPU could hold with its KV cache."""
    launch = s.launch
    width, copies = launch.flag("tp_size") or 1, launch.flag("dp_size") or 1
    if width < 2 or copies > 1 or not launch.weights_gb or not launch.total_gb:
        return False
    return launch.weights_gb * width <= DP_WEIGHTS * launch.total_gb


def _balance(s: Statistics) -> Change:
    if s.launch.flag("enable_eplb"):
        return Change("--ep-num-redundant-experts", (s.launch.flag("ep_num_redundant_experts") or 0) + 32)
    return Change("--enable-eplb", True)


def _drafts(s: Statistics) -> Change:
    if s.launch.is_ours and s.launch.flag("speculative_num_steps") != "auto":
        return Change("--speculative-num-steps", "auto")
    return Change("--speculative-algorithm")


def _least_accept_len(s: Any) -> float:
    """Tokens of a step at which its drafts pay off; with an automatic depth the engine measures this itself."""
    steps = s.launch.flag("speculative_num_steps")
    if (s.launch.flag("speculation") or {}).get("auto_depth"):
        return 0.0
    return max(POOR_DRAFTS, 1 + DRAFT_COST * int(steps)) if str(steps).isdigit() else POOR_DRAFTS


def _full_pool(s: Any) -> str | None:
    """The pool of windows or states that is fuller than that of full attention; None: neither, or at its largest."""
    names = [name for name in POOL_RATIOS if (getattr(s, name) or 0.0) > max(ROOM, s.kv_usage)]
    return next((name for name in names if _pool_ratio(s, name) > _ratio(s, name)), None)


def _ratio(s: Statistics, pool: str) -> float:
    flag, default, _ = POOL_RATIOS[pool]
    return s.launch.flag(flag) or default


def _pool_ratio(s: Any, pool: str) -> float:
    """The ratio at which both pools fill at once, at most twice the current one."""
    factor = min(2.0, getattr(s, pool) / max(s.kv_usage, 0.01))
    return round(min(POOL_RATIOS[pool][2], factor * _ratio(s, pool)), 2)


def _larger_pool(s: Statistics) -> Change:
    pool = _full_pool(s) or "swa_usage"
    return Change(f"--{POOL_RATIOS[pool][0].replace('_', '-')}", _pool_ratio(s, pool))


def _is_paged(s: Statistics) -> bool:
    backends = (s.launch.flag(f"{phase}attention_backend") for phase in ("", "decode_", "prefill_"))
    return any(name in PAGED_BACKENDS for name in backends)


def _mixed(s: Statistics) -> Change:
    return _smaller_chunk(s) if s.launch.flag("enable_mixed_chunk") else Change("--enable-mixed-chunk", True)


RULES: tuple[Rule, ...] = (
    Rule(
        "queue_empty", "#queue-req is nearly always 0, few requests run and the KV cache is half empty",
        ("queue_empty", "usage", "running"),
        lambda s: s.queue_empty >= FULL and s.usage < IDLE_USAGE and s.running < IDLE_REQUESTS * _limit(s),
        "#queue-req was 0 in {queue_empty:.0%} of {num_decode} decode lines, {running:g} requests ran, token usage "
        "{usage:.2f}",
        "decode", lambda s: Change(""),
        "send more requests concurrently: the server has room, and a larger batch raises throughput; nothing to do for "
        "latency", GUIDE, "info",
    ),
    Rule(
        "queue_long", f"#queue-req is above {MAX_QUEUE}", ("queue",),
        lambda s: s.queue > MAX_QUEUE,
        "median #queue-req {queue:g} in {num_batches} lines", "queue",
        lambda s: Change("--max-queued-requests", MAX_QUEUE),
        "further requests get status 503 immediately instead of waiting; scheduling gets cheaper; more replicas serve "
        "them", GUIDE,
    ),
    Rule(
        "prefill_queue", "on a server that only prefills as many requests wait as a step computes",
        ("behind", "queue", "usage"),
        lambda s: s.behind > OFTEN,
        "in {behind:.0%} of {num_batches} lines a step or more of requests waited (median #queue-req {queue:g}), token "
        "usage {usage:.2f}",
        "queue", _faster_prefills,
        "prompts wait longer than they are computed: a larger chunk delays no decodes here; if steps do not fill it, "
        "add prefill servers (embeddings: --dp-size), or at token usage near 1 faster transfers", OURS,
    ),
    Rule(
        "too_conservative", f"token usage below {ROOM} while requests wait, and not for lack of running requests",
        ("room_but_waiting", "running", "usage", "queue"),
        lambda s: s.room_but_waiting > OFTEN and _waits(s) and not _at_limit(s) and not _is_decode_server(s)
        and not _is_retracting(s) and not s.oom_pool and not s.launch.flag("autopilot"),
        f"in {{room_but_waiting:.0%}} of {{num_decode}} decode lines requests waited with token usage below {ROOM} "
        "(median {usage:.2f}, #queue-req {queue:g})",
        "room",
        lambda s: Change(
            "--schedule-conservativeness",
            round(min(LESS_CONSERVATIVE, s.launch.conservativeness / 2), 3),
        ),
        "admits more requests: less of their max_new_tokens is reserved; retractions may follow", GUIDE,
    ),
    Rule(
        "running_limit", f"token usage below {ROOM} while requests wait, at --max-running-requests",
        ("room_but_waiting", "running", "usage"),
        lambda s: s.room_but_waiting > OFTEN and _at_limit(s) and not s.oom_decode
        and not s.oom_pool,
        "{running:g} requests ran, as many as the limit admits, in most of {num_decode} decode lines; #queue-req "
        "{queue:g}, token usage {usage:.2f}",
        "room", lambda s: Change("--max-running-requests", _useful_requests(s)),
        "a larger batch uses the KV cache that is free: more tokens a second, each request a little slower", GUIDE,
    ),
    Rule(
        "retractions", "more than about one retraction a minute", ("retractions_a_minute",),
        _is_retracting,
        "{retractions} retractions, {retractions_a_minute:.1f} a minute", "retraction",
        lambda s: Change("--schedule-conservativeness", _more_conservative(s)),
        "reserves more for the answers of admitted requests: fewer are computed twice", GUIDE,
    ),
    Rule(
        "memory_unused", f"available_gpu_mem above {MAX_FREE_GB:g} GB", ("launch.available_gb",),
        lambda s: _free(s) > MAX_FREE_GB and not s.launch.flag("max_total_tokens"),
        "available_gpu_mem={launch.available_gb:.2f} GB at the start", "",
        _fraction, "the KV cache gets the memory that is left over", GUIDE,
    ),
    Rule(
        "memory_short", f"available_gpu_mem below {MIN_FREE_GB:g} GB", ("launch.available_gb",),
        lambda s: _free(s) < MIN_FREE_GB,
        "available_gpu_mem={launch.available_gb:.2f} GB at the start", "",
        _fraction, "leaves memory for activations and CUDA graphs: no out-of-memory errors later", GUIDE,
    ),
    Rule(
        "oom_start", "out of memory before READY", ("oom_start",), lambda s: s.oom_start > 0,
        "{oom_start} out-of-memory errors at the start", "oom_start", _fit_at_start,
        "the weights need more GPUs (or --quantization); loaded weights and the KV cache leave too little for CUDA "
        "graphs, whose memory --cuda-graph-max-bs limits", GUIDE, "error",
    ),
    Rule(
        "no_room_for_kv", "the weights leave no memory for the KV cache", ("no_room_for_kv",),
        lambda s: s.no_room_for_kv > 0, "the start failed: nothing of --mem-fraction-static is left", "no_room_for_kv",
        _room_for_kv, "--mem-fraction-static covers the weights and the KV cache, which gets the rest of it; beyond "
        f"{LARGEST_FRACTION:g} the weights need more GPUs (or --quantization)", GUIDE, "error",
    ),
    Rule(
        "oom_prefill", "out of memory in prefill", ("oom_prefill",), lambda s: s.oom_prefill > 0,
        "{oom_prefill} out-of-memory errors in prefill", "oom_prefill", _smaller_chunk,
        "smaller activations; long prompts take more steps", GUIDE, "error",
    ),
    Rule(
        "oom_decode", "out of memory in decode", ("oom_decode",), lambda s: s.oom_decode > 0,
        "{oom_decode} out-of-memory errors in decode", "oom_decode",
        _fewer_requests, "fewer concurrent requests: less memory for a step", GUIDE, "error",
    ),
    Rule(
        "oom_pool", "the KV cache had no room for a planned step", ("oom_pool",), lambda s: s.oom_pool > 0,
        "{oom_pool} such errors; the largest batch had {max_running:g} requests", "oom_pool", _more_room,
        "the pool that was full gets more memory, or fewer requests share it; the GPU's memory and the chunk are not "
        "the cause", OURS, "error",
    ),
    Rule(
        "hang", "a watchdog has ended a step or a collective operation", ("hang",), lambda s: s.hang > 0,
        "{hang} reports of watchdogs", "hang", lambda s: Change(""),
        "look for the first error in the logs of all ranks: the others wait for the rank that failed; a step that is "
        "only slow, as one that compiles kernels, needs a larger --watchdog-timeout", OURS, "error",
    ),
    Rule(
        "no_cuda_graph", f"cuda graph: False in batches of up to {MAX_SMALL_BATCH} requests", ("graph_off",),
        lambda s: s.launch.on_gpu and s.graph_off >= OFTEN,
        f"cuda graph: False in {{graph_off:.0%}} of the decode lines with at most {MAX_SMALL_BATCH} requests (up to "
        "{max_running:g})",
        "graph", _graphs, "steps are replayed: the host no longer launches every kernel", GUIDE,
    ),
    Rule(
        "prefix_order", f"cache hit rate {SHARED_PREFIXES:.0%} to {GOOD_HIT_RATE:.0%} with a queue and fcfs",
        ("hit_rate", "queue", "running"),
        lambda s: SHARED_PREFIXES <= s.hit_rate < GOOD_HIT_RATE and _waits(s) and s.queue <= LPM_QUEUE
        and s.launch.flag("schedule_policy") in (None, "fcfs") and not s.launch.flag("autopilot"),
        "{hit_rate:.0%} of the prompt tokens were cached, #queue-req {queue:g}, order of arrival", "prefill",
        lambda s: Change("--schedule-policy", "lpm"),
        "requests with a cached prefix come first, before it is evicted", GUIDE,
    ),
    Rule(
        "page_size", "pages are larger than the part of a prompt that is not cached", ("new_per_seq", "hit_rate"),
        lambda s: (s.launch.flag("page_size") or 1) > max(1.0, s.new_per_seq) and s.hit_rate >= SHARED_PREFIXES
        and not _is_paged(s),
        "{new_per_seq:.0f} prompt tokens were computed for each sequence, hit rate {hit_rate:.0%}", "prefill",
        lambda s: Change("--page-size", 1),
        "prefixes are shared to the token, not to the page", OURS,
    ),
    Rule(
        "long_prompts", f"{LONG_RUN} and more full chunks for one prompt, while no other request runs",
        ("full_chunks", "chunk_run", "stalling_run"),
        lambda s: s.full_chunks >= OFTEN and s.chunk_run >= LONG_RUN and s.stalling_run < 2 and not s.oom_prefill
        and s.launch.of_rank("chunked_prefill_size") < LARGEST_CHUNK,
        "{full_chunks:.0%} of {num_prefill} prefill lines fill the chunk, {chunk_run} of them for one prompt", "chunk",
        _larger_chunk, "fewer steps for a long prompt: an earlier first token", GUIDE,
    ),
    Rule(
        "stalled_decodes", "full chunks in succession while other requests run", ("stalling_chunks", "stalling_run"),
        lambda s: s.stalling_run >= 2 and s.stalling_chunks >= STALLS and not s.launch.only_prefills,
        "{stalling_chunks:.0%} of {num_prefill} prefill lines fill the chunk while others run (median "
        "{running_at_chunks:g}), up to {stalling_run} in succession",
        "stall", _mixed,
        "running requests get a token in every step, also during a long prompt", GUIDE,
    ),
    Rule(
        "tp_or_dp", "tensor parallelism over weights that fit one GPU twice, while requests wait",
        ("queue", "launch.weights_gb", "launch.total_gb"), lambda s: s.queue >= 1 and _fits_twice(s),
        "{launch.weights_gb:.1f} GB of weights a GPU of {launch.total_gb:.0f} GB, #queue-req {queue:g}", "queue",
        _data_parallel, "each GPU serves its own requests, without all-reduce (--tp-size 1; --enable-dp-attention for "
        "models with MLA that need all GPUs)", GUIDE,
    ),
    Rule(
        "kv_dtype", f"token usage above {ROOM} with 16-bit KV, while requests wait or are retracted",
        ("kv_usage", "queue"),
        lambda s: s.kv_usage > ROOM and (s.queue >= 1 or s.retractions > 0) and bool(s.launch.has_16_bit_kv),
        "token usage {kv_usage:.2f}, #queue-req {queue:g}, {retractions} retractions, KV cache in 16 bits", "queue",
        lambda s: Change("--kv-cache-dtype", "fp8_e4m3"),
        "nearly twice the tokens in the same memory; check the answers' quality at long contexts", GUIDE,
    ),
    Rule(
        "pool_ratio", f"usage of the pool of windows or of states above {ROOM}, and below it in full attention, while "
        "requests wait or are retracted", ("kv_usage", "queue"),
        lambda s: _full_pool(s) is not None and s.kv_usage < ROOM and (s.queue >= 1 or s.retractions > 0),
        "full token usage {kv_usage:.2f}, usage of the fullest pool {usage:.2f}, #queue-req {queue:g}, {retractions} "
        "retractions", "queue", _larger_pool,
        "the full pool gets memory of the other one, so that more requests fit", OURS,
    ),
    Rule(
        "expert_imbalance", f"balancedness of the experts below {POOR_BALANCE}", ("balancedness",),
        lambda s: s.balancedness < POOR_BALANCE,
        "balancedness {balancedness:.2f} over 100 passes: the busiest rank has 1/{balancedness:.2f} of the mean",
        "balance", _balance, "copies of busy experts move to idle ranks; every step waits for the busiest one", OURS,
    ),
    Rule(
        "late_ranks", "a rank is late", ("late",), lambda s: s.late > 0,
        "{late} reports, most of {late_rank}", "late", lambda s: Change(""),
        "look at that machine (clock rate, other processes, its link; moe-engine cluster-check): all ranks wait for "
        "the last one", OURS,
    ),
    Rule(
        "drafts_do_not_pay", f"accept len below {POOR_DRAFTS}, or below 1 + {DRAFT_COST:g} for each draft step",
        ("accept_len",), lambda s: s.accept_len < _least_accept_len(s),
        "median accept len {accept_len:.2f}: {num_decode} decode lines", "decode", _drafts,
        "no step verifies drafts that are rejected; auto measures it for each step", OURS,
    ),
    Rule(
        "dp_imbalance", f"the busiest DP rank has more than {UNBALANCED:g} times the mean",
        ("rank_imbalance", "busiest_rank"),
        lambda s: s.rank_imbalance > UNBALANCED and s.launch.flag("load_balance_method") != "total_tokens",
        "DP{busiest_rank} runs {rank_imbalance:.1f} times the mean of the ranks", "decode",
        lambda s: Change("--load-balance-method", "total_tokens"),
        "new requests go to the rank with the fewest tokens; ranks with attention groups wait for the fullest", OURS,
    ),
    Rule(
        "jit_after_ready", "kernels are compiled after READY", ("jit",), lambda s: s.jit > 0,
        "{jit} compilations after READY", "jit", lambda s: Change(""),
        "compile ahead of time: `moe-engine compile` (SGLang: `python3 -m sglang.compile_deep_gemm`); requests then "
        "never wait for a compiler", OURS,
    ),
)  # fmt: skip
