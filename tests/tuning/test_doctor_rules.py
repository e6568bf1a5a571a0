"""For each rule of the doctor a log for which it holds, and one just beyond its threshold."""

from __future__ import annotations

import pytest

from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.tuning.doctor.diagnosis import Diagnosis
from moe_engine.tuning.doctor.live import launch_of
from moe_engine.tuning.doctor.log_lines import LogEvent
from moe_engine.tuning.doctor.memory_costs import ledger_args
from moe_engine.tuning.doctor.rules import RULES
from moe_engine.tuning.doctor.window import Window
from tests.tuning import logs
from tests.tuning.logs import decode, decodes, findings, flags, kv_cache, prefill, ready, retraction, startup, weights

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.10 GiB in total"
EXTEND = '  File "/sglang/srt/model_executor/model_runner.py", line 2001, in forward_extend'
GRAPHS = '  File "/sglang/srt/model_executor/model_runner.py", line 934, in init_cuda_graphs'
DECODE = '  File "/sglang/srt/model_executor/model_runner.py", line 1950, in forward_decode'
NO_ROOM = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
CAPTURE = "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 448.00 MiB."
DP_ATTENTION = flags(
    tp_size=8, dp_size=8, enable_dp_attention=True, max_running_requests=128, chunked_prefill_size=1024,
    schedule_conservativeness=0.3,
)  # fmt: skip
"""SGLang's line for --chunked-prefill-size 8192 --schedule-conservativeness 1: eight attention DP ranks have divided
the chunk and reduced the conservativeness; the running requests are those of all ranks."""
RANK = startup(max_running_requests=16, chunked_prefill_size=1024)
FULL = [prefill(second, new=8192, seqs=1) for second in range(8)]


def minutes(count: int, of: int) -> list[str]:
    """`count` retractions in `of` minutes of decodes."""
    lines = [decode(second) for second in range(0, 60 * of + 1, 10)]
    return [*lines[:3], *[retraction(30) for _ in range(count)], *lines[3:]]


def balance(value: float) -> list[str]:
    return [
        f"{logs.stamp(second)} [Expert Balancedness] forward_pass_id={second} current_pass_balancedness=0.100 "
        f"last_10_average_balancedness=0.900 last_100_average_balancedness={value:.03f} "
        "last_1000_average_balancedness=0.900 gpu_physical_count_sum=1000"
        for second in range(6)
    ]


def of_ranks(first: int, second: int) -> list[str]:
    """Interleaved decode lines of two attention groups."""
    running = {"DP0 TP0": first, "DP1 TP4": second}
    return [decode(moment, running=count, rank=rank) for moment in range(8) for rank, count in running.items()]


Case = tuple[list[str], list[str]]
CASES: dict[str, Case] = {
    "queue_empty": (
        [startup(), *decodes(running=20, usage=0.2, queue=0)],
        [startup(), *decodes(18, running=20, usage=0.2, queue=0), *decodes(2, running=20, usage=0.2, queue=1)],
    ),
    "queue_long": (decodes(queue=2001), decodes(queue=2000)),
    "prefill_queue": (
        [logs.prefill_server(second, queue=4 if second < 6 else 3) for second in range(11)],
        [logs.prefill_server(second, queue=4 if second < 5 else 3) for second in range(10)],
    ),
    "too_conservative": (
        [*decodes(11, usage=0.89, queue=10), *decodes(9, usage=0.9, queue=10)],
        [*decodes(10, usage=0.89, queue=10), *decodes(10, usage=0.9, queue=10)],
    ),
    "running_limit": (
        [startup(max_running_requests=100), *decodes(running=95, usage=0.5)],
        [startup(max_running_requests=100), *decodes(running=94, usage=0.5)],
    ),
    "retractions": (minutes(6, of=5), minutes(5, of=5)),
    "memory_unused": ([startup(8.01), *decodes()], [startup(8.0), *decodes()]),
    "memory_short": ([startup(4.99), *decodes()], [startup(5.0), *decodes()]),
    "oom_start": ([weights(9.0)[0], "Traceback:", EXTEND, OOM], [weights(9.0)[0], ready(), "Traceback:", EXTEND, OOM]),
    "no_room_for_kv": ([*weights(70.0), NO_ROOM], [*weights(70.0), "Not enough memory for the host pool"]),
    "oom_prefill": ([*decodes(), "Traceback:", EXTEND, OOM], [*decodes(), "Traceback:", DECODE, OOM]),
    "oom_decode": ([*decodes(), "Traceback:", DECODE, OOM], [*decodes(), "Traceback:", EXTEND, OOM]),
    "oom_pool": (
        [*decodes(), *logs.pool_error(30, full=3136)],
        [*decodes(), "Available full tokens: 3136 (full_available_size=3136 + full_evictable_size_=0)"],
    ),
    "hang": (
        [*decodes(), f"{logs.stamp(30, 'TP1')} Scheduler watchdog timeout (self.watchdog_timeout=300)"],
        [*decodes(), "    _watchdog_thread (utils/watchdog.py:125)", "watchdog_timeout=300"],
    ),
    "no_cuda_graph": (
        [*decodes(10, graph=False), *decodes(10)],
        [*decodes(9, graph=False), *decodes(11)],
    ),
    "prefix_order": (
        [*decodes(queue=128), *[prefill(second, new=900, cached=100) for second in range(6)]],
        [*decodes(queue=128), *[prefill(second, new=901, cached=100) for second in range(6)]],
    ),
    "page_size": (
        [flags(page_size=64), *[prefill(second, new=63, cached=640, seqs=1) for second in range(6)]],
        [flags(page_size=64), *[prefill(second, new=64, cached=640, seqs=1) for second in range(6)]],
    ),
    "long_prompts": ([startup(), *FULL[:4], prefill(9)], [startup(), *FULL[:3], prefill(8), prefill(9)]),
    "stalled_decodes": (
        [startup(), *[prefill(s, new=8192, seqs=1, running=5) for s in range(2)], *[prefill(s) for s in range(3)]],
        [startup(), *[prefill(s, new=8191, seqs=1, running=5) for s in range(2)], *[prefill(s) for s in range(3)]],
    ),
    "tp_or_dp": (
        [flags(tp_size=4, dp_size=1), *weights(9.87), *decodes(queue=1)],
        [flags(tp_size=4, dp_size=1), *weights(9.88), *decodes(queue=1)],
    ),
    "kv_dtype": (
        [kv_cache(), *decodes(usage=0.91, queue=1)],
        [kv_cache(), *decodes(usage=0.90, queue=1)],
    ),
    "pool_ratio": (
        [logs.pools(second, 0.4, swa=0.91) for second in range(6)],
        [logs.pools(second, 0.4, swa=0.90) for second in range(6)],
    ),
    "expert_imbalance": (balance(0.699), balance(0.7)),
    "late_ranks": (
        [*decodes(), f"{logs.stamp(30)} rank 3 on node1 is late: step 812, layer 4, dispatch, 2.3 s"],
        [*decodes(), f"{logs.stamp(30)} Every rank is slow: step 812, layer 4, dispatch, 2.3 s"],
    ),
    "drafts_do_not_pay": (decodes(accept=1.29), decodes(accept=1.30)),
    "dp_imbalance": (of_ranks(76, 24), of_ranks(75, 25)),
    "jit_after_ready": (
        [ready(), *decodes(), f"{logs.stamp(40)} silu was compiled (3.10 s) after READY: warm-up did not launch it"],
        [f"{logs.stamp(0)} DeepGEMM warmup: 100%", ready(), *decodes()],
    ),
}  # fmt: skip


def test_every_rule_has_a_case():
    assert list(CASES) == [rule.name for rule in RULES]


@pytest.mark.parametrize("rule", CASES)
def test_rule_holds_and_just_does_not(rule):
    shown, below = CASES[rule]
    assert rule in findings(shown)
    assert rule not in findings(below)


@pytest.mark.parametrize("rule", CASES)
def test_a_finding_is_complete(rule):
    (declared,) = (one for one in RULES if one.name == rule)
    shown = CASES[rule][0]
    finding = findings(shown)[rule]
    assert finding.source and finding.effect and "?" not in finding.evidence
    if declared.line:
        assert finding.line == shown[finding.line_number - 1].strip()
    if finding.flag:
        assert finding.flag.startswith("--") and finding.memory


@pytest.mark.parametrize(
    ("lines", "rule", "flag", "value"),
    [
        (CASES["retractions"][0], "retractions", "--schedule-conservativeness", 1.3),
        ([flags(schedule_conservativeness=2.0), *minutes(6, 5)], "retractions", "--schedule-conservativeness", 2.6),
        ([flags(schedule_conservativeness=0.3), *minutes(6, 5)], "retractions", "--schedule-conservativeness", 1.0),
        (CASES["too_conservative"][0], "too_conservative", "--schedule-conservativeness", 0.3),
        (CASES["running_limit"][0], "running_limit", "--max-running-requests", 180),
        ([startup(), *CASES["oom_prefill"][0]], "oom_prefill", "--chunked-prefill-size", 4096),
        ([startup(chunked_prefill_size=4096), *CASES["oom_prefill"][0]], "oom_prefill", "--chunked-prefill-size", 2048),
        (CASES["oom_decode"][0], "oom_decode", "--max-running-requests", 75),
        ([flags(tp_size=4), *CASES["oom_start"][0]], "oom_start", "--tp-size", 8),
        ([flags(mem_fraction_static=0.9), *weights(9.0), OOM], "oom_start", "--mem-fraction-static", 0.85),
        ([*weights(9.0), OOM], "oom_start", "--mem-fraction-static", "0.05 lower"),
        ([CAPTURE], "oom_start", "--mem-fraction-static", "0.05 lower"),
        ([GRAPHS, DECODE, OOM], "oom_start", "--mem-fraction-static", "0.05 lower"),
        ([flags(mem_fraction_static=0.85), NO_ROOM], "no_room_for_kv", "--mem-fraction-static", 0.9),
        ([flags(mem_fraction_static=0.92, tp_size=2), NO_ROOM], "no_room_for_kv", "--tp-size", 4),
        ([NO_ROOM], "no_room_for_kv", "--mem-fraction-static", "0.05 higher"),
        ([DP_ATTENTION, RANK, *decodes(running=15, usage=0.1, queue=1)], "running_limit", "--max-running-requests",
         136),
        ([DP_ATTENTION, RANK, *decodes(running=9, usage=0.1)], "too_conservative", "--schedule-conservativeness", 0.3),
        ([DP_ATTENTION, *minutes(6, 5)], "retractions", "--schedule-conservativeness", 1.3),
        ([DP_ATTENTION, *[prefill(s, new=1024, seqs=1) for s in range(5)]], "long_prompts", "--chunked-prefill-size",
         16384),
        ([DP_ATTENTION, *decodes(), "Traceback:", EXTEND, OOM], "oom_prefill", "--chunked-prefill-size", 4096),
        ([DP_ATTENTION, *CASES["oom_decode"][0]], "oom_decode", "--max-running-requests", 600),
        ([flags(cuda_graph_max_bs_decode=8), *decodes(graph=False)], "no_cuda_graph", "--cuda-graph-max-bs-decode",
         128),
        ([startup(), *FULL[:4], prefill(9)], "long_prompts", "--chunked-prefill-size", 16384),
        (CASES["no_cuda_graph"][0], "no_cuda_graph", "--cuda-graph-max-bs", 128),
        ([flags(disable_cuda_graph=True), *decodes(graph=False)], "no_cuda_graph", "--disable-cuda-graph", None),
        ([flags(enable_mixed_chunk=True), *CASES["stalled_decodes"][0]], "stalled_decodes", "--chunked-prefill-size",
         4096),
        (CASES["pool_ratio"][0], "pool_ratio", "--swa-full-tokens-ratio", 1.0),
        ([flags(swa_full_tokens_ratio=0.2), *CASES["pool_ratio"][0]], "pool_ratio", "--swa-full-tokens-ratio", 0.4),
        ([logs.pools(second, 0.66, mamba=0.99) for second in range(6)], "pool_ratio", "--mamba-full-memory-ratio",
         1.35),
        ([flags(enable_eplb=True), *balance(0.5)], "expert_imbalance", "--ep-num-redundant-experts", 32),
        (CASES["drafts_do_not_pay"][0], "drafts_do_not_pay", "--speculative-algorithm", None),
        ([f"{logs.stamp(0)} Memory ledger: 1 GB", *decodes(accept=1.1)], "drafts_do_not_pay",
         "--speculative-num-steps", "auto"),
    ],
)  # fmt: skip
def test_changes(lines, rule, flag, value):
    finding = findings(lines)[rule]
    assert (finding.flag, finding.value) == (flag, value)


def test_memory_fraction_leaves_what_the_guide_asks_for():
    """13.5 GB are free at 0.85 of 79 GB: 7 GB more for the KV cache leave the guide's 5 to 8 GB."""
    lines = [flags(mem_fraction_static=0.85), *weights(30.0), kv_cache(), startup(13.5), *decodes()]
    finding = findings(lines)["memory_unused"]
    more = (finding.value - 0.85) * 79
    assert 5 <= 13.5 - more <= 8
    assert finding.memory_bytes == pytest.approx(more * 2**30, rel=1e-6)
    per_token = 40.0 * 2**30 / 665690
    assert f"{int(finding.memory_bytes / per_token)} tokens more" in finding.memory
    lower = findings([flags(mem_fraction_static=0.95), *weights(30.0), startup(2.0), *decodes()])["memory_short"]
    assert 5 <= 2.0 - (lower.value - 0.95) * 79 <= 8


def test_a_cpu_has_no_gpu_rules():
    lines = [flags(device="cpu"), startup(22.0), *decodes(graph=False)]
    assert not {"memory_unused", "memory_short", "no_cuda_graph"} & findings(lines).keys()


def test_deep_drafts_must_accept_more():
    """Six draft steps gain from 1.9 tokens on; the rule ignores a depth chosen by the engine."""
    deep = flags(speculative_num_steps=6)
    assert "drafts_do_not_pay" in findings([deep, *decodes(accept=1.89)])
    assert "drafts_do_not_pay" not in findings([deep, *decodes(accept=1.90)])
    auto = flags(speculative_num_steps=6, speculation={"auto_depth": True})
    assert "drafts_do_not_pay" not in findings([auto, *decodes(accept=1.05)])


def test_the_ledger_needs_no_rule_of_thumb():
    """This engine counts the largest step before allocation; SGLang's fraction is an estimate."""
    for available in (2.0, 20.0):
        lines = [f"{logs.stamp(0)} Memory ledger: 70.00 GB of 75.00 GB", startup(available), *decodes()]
        assert not {"memory_unused", "memory_short"} & findings(lines).keys()


def test_long_prompts_after_the_others_ended():
    """Chunks with running requests count, also if most prompts arrive when no request runs."""
    beside = [prefill(s, new=8192, seqs=1, running=4) for s in range(2)]
    alone = [prefill(3 + s, new=8192 if s % 4 else 100, seqs=1) for s in range(8)]
    assert "stalled_decodes" in findings([startup(), *beside, *alone])
    assert "stalled_decodes" not in findings([startup(), *beside, *alone, prefill(30)])


def test_own_lines_count_the_prompt_itself():
    """This engine's line counts a continued prompt among the running requests."""
    own = f"{logs.stamp(0)} Memory ledger: 1 GB"
    chunks = [prefill(s, new=8192, seqs=1, running=int(s > 0)) for s in range(6)]
    assert "long_prompts" in findings([own, startup(), *chunks])
    assert "stalled_decodes" in findings([startup(), *chunks])


def test_a_short_queue_waits_for_its_prefill():
    """Among 40 running requests two or three that wait come with the next step, whatever the settings are."""
    prompts = [prefill(second, new=500, cached=500) for second in range(6)]
    assert {"too_conservative", "prefix_order"} <= findings([*decodes(running=40, usage=0.1, queue=4), *prompts]).keys()
    short = findings([*decodes(running=40, usage=0.1, queue=3), *prompts])
    assert not {"too_conservative", "prefix_order"} & short.keys()


def test_no_rule_reverses_the_advice_of_another():
    """Each log shows the conditions of two rules that change one flag in opposite directions."""
    crowded = decodes(61, running=100, usage=0.5, queue=50)
    retracting = findings([*crowded, *[retraction(60)] * 2])
    assert "retractions" in retracting and "too_conservative" not in retracting
    assert "too_conservative" in findings([*crowded, retraction(60)])
    limited = [startup(max_running_requests=100), *crowded]
    assert "running_limit" in findings(limited)
    for rule, error in (("oom_decode", ["Traceback:", DECODE, OOM]), ("oom_pool", logs.pool_error(62, full=9))):
        failing = findings([*limited, *error])
        assert rule in failing and "running_limit" not in failing
    assert "too_conservative" not in findings([*crowded, *logs.pool_error(62, full=9)])
    prompts = [startup(), ready(), *FULL]
    assert "long_prompts" in findings(prompts)
    failing = findings([*prompts, "Traceback:", EXTEND, OOM])
    assert "oom_prefill" in failing and "long_prompts" not in failing


def test_policy_and_balance_are_not_advised_twice():
    for launch in (flags(schedule_policy="lpm"), flags(schedule_policy="fcfs", autopilot=True)):
        assert "prefix_order" not in findings([launch, *CASES["prefix_order"][0]])
    assert "too_conservative" not in findings([flags(autopilot=True), *CASES["too_conservative"][0]])


@pytest.mark.parametrize("prefix", ["", "2025-08-11T17:17:09.1Z stderr F ", "engine-1  | ", "(Engine pid=41) "])
def test_tracebacks_with_prefixes(prefix):
    for last, place in (("oom_prefill", EXTEND), ("oom_decode", DECODE)):
        lines = [*decodes(), prefill(30), "Traceback:", place, "    return self.model.forward(", OOM]
        assert last in findings([prefix + line for line in lines])


def test_the_advice_of_a_pool_is_about_that_pool():
    """FP8 halves the KV cache: it gives no state of a delta net and no window more room."""
    full = [logs.pools(second, 0.95, mamba=0.99) for second in range(6)]
    assert "kv_dtype" in findings([kv_cache(), *full]) and "pool_ratio" not in findings([kv_cache(), *full])
    states = [logs.pools(second, 0.35, mamba=0.99) for second in range(6)]
    assert "kv_dtype" not in findings([kv_cache(), *states])
    idle = [logs.pools(second, 0.35, mamba=0.99, queue=0) for second in range(6)]
    largest = [flags(swa_full_tokens_ratio=1.0), *CASES["pool_ratio"][0]]
    assert "pool_ratio" not in findings(idle) and "pool_ratio" not in findings(largest)


def test_the_queue_of_a_decode_server():
    """Requests wait there for memory before their KV is transferred; no reserve of the scheduler holds them back."""
    waiting = findings([kv_cache(), *[logs.decode_server(second) for second in range(6)]])
    assert waiting["kv_dtype"].evidence.startswith("token usage 0.97, #queue-req 21")
    for prealloc, queue in ((21, 0), (0, 9)):
        lines = [logs.decode_server(second, usage=0.3, prealloc=prealloc, queue=queue) for second in range(6)]
        assert not {"queue_empty", "too_conservative"} & findings([startup(), *lines]).keys()
    idle = [logs.decode_server(second, usage=0.3, prealloc=0) for second in range(6)]
    assert "queue_empty" in findings([startup(), *idle])


def test_no_advice_that_changes_nothing():
    """The flag already has the advised value, the backend prescribes it, or another flag limits the cache."""
    prompts = CASES["page_size"][0]
    assert "page_size" not in findings([flags(page_size=64, attention_backend="nsa"), *prompts[1:]])
    assert "dp_imbalance" not in findings([flags(load_balance_method="total_tokens"), *of_ranks(76, 24)])
    assert "memory_unused" not in findings([flags(max_total_tokens=100000), startup(20.0), *decodes()])


def test_a_drafter_is_not_the_model():
    lines = [flags(tp_size=4, dp_size=1), *weights(60.0), *weights(2.0, 19.0), *decodes(queue=1)]
    assert logs.read(lines).launch.weights_gb == 60.0 and "tp_or_dp" not in findings(lines)


def test_fewer_requests_than_ran():
    """Also in a log with few lines: the advice is below the requests that ran."""
    finding = findings([decode(1, running=100), "RuntimeError: Decode out of memory. Try to lower your batch size."])
    assert finding["oom_pool"].value == 75


def test_a_full_pool_is_not_the_memory_of_the_gpu():
    """A smaller chunk gave the pool of windows no room: the start after it failed in the same way."""
    short = findings([flags(swa_full_tokens_ratio=0.1), *decodes(), *logs.pool_error(30, full=899840, swa=3840)])
    assert (short["oom_pool"].flag, short["oom_pool"].value) == ("--swa-full-tokens-ratio", 0.2)
    assert "oom_prefill" not in short
    largest = findings([flags(swa_full_tokens_ratio=1.0), *decodes(), *logs.pool_error(30, full=899840, swa=3840)])
    assert (largest["oom_pool"].flag, largest["oom_pool"].value) == ("--max-running-requests", 75)
    for full, swa in ((3136, 90000), (3136, None)):
        assert findings([*decodes(), *logs.pool_error(30, full, swa)])["oom_pool"].flag == "--max-running-requests"


def test_the_queue_of_a_prefill_server():
    """It decodes nothing, so that no decode line has its queue."""
    for line in (logs.prefill_server, lambda second, **v: logs.prefill(second, **v)):
        launch = [flags(disaggregation_mode="prefill"), startup(chunked_prefill_size=8192)]
        full = findings([*launch, *[line(s, queue=9, seqs=3, new=8000) for s in range(6)]])
        assert (full["prefill_queue"].flag, full["prefill_queue"].value) == ("--chunked-prefill-size", 16384)
        part = findings([*launch, *[line(s, queue=9, seqs=3, new=4000) for s in range(6)]])
        assert part["prefill_queue"].flag == "" and "median #queue-req 9" in part["prefill_queue"].evidence
        assert "queue_long" in findings([*launch, *[line(s, queue=2001) for s in range(6)]])
    busy = [prefill(second, queue=9, seqs=3) for second in range(6)]
    assert "prefill_queue" not in findings([flags(disaggregation_mode=None), *busy])  # decodes are between them
    assert "prefill_queue" in findings([flags(is_embedding=True), *busy])


def test_samples_of_a_prefill_server():
    """Its KV cache has room while requests wait: they wait for compute, whatever the conservativeness is."""
    launch = launch_of({"disaggregation_mode": "prefill", "chunked_prefill_size": 8192, "max_running_requests": 64})
    window = Window(launch, of_log=False)
    for second in range(6):
        window.add(LogEvent("decode", second, "DP0", {"running": 0.0, "queue": 7.0, "usage": 0.2}))
    diagnosis = Diagnosis()
    diagnosis.add(window.statistics())
    assert [finding.name for finding in diagnosis.findings()] == ["prefill_queue"]


@pytest.mark.parametrize(
    "line",
    [
        "Receive: obj=GenerateReqInput(rid='a', text='Why CUDA out of memory in Decode batch?', sampling_params={})",
        "Finish: obj=GenerateReqInput(rid='a', text='x'), out={'text': 'torch.OutOfMemoryError: raise the fraction'}",
        '{"timestamp": "2026-07-01T10:00:00", "event": "request.received", "obj": {"text": "CUDA out of memory"}}',
        '{"event":"request.finished","obj":{"text":"x"},"out":{"text":"torch.OutOfMemoryError: raise the fraction"}}',
        "Memory cgroup out of memory: Killed process 4711 (sglang::schedul) total-vm:131072kB",
        "Decode out of memory happened. #retract",
    ],
)
def test_other_words_about_memory(line):
    """Texts of requests, the kernel's messages and lines that are cut off: no failure of the GPU's memory."""
    for lines in ([*decodes(), f"{logs.stamp(30)} {line}"], [*decodes(), line]):
        assert not {"oom_start", "oom_prefill", "oom_decode"} & findings(lines).keys()


def test_windows():
    """A rule that held in one of three windows is reported so, with that window's evidence."""
    lines = [*decodes(), *[decode(400 + s, queue=3000) for s in range(20)], *[decode(800 + s) for s in range(20)]]
    finding = findings(lines, window=300)["queue_long"]
    assert finding.windows == (1, 3) and "3000" in finding.evidence
    assert "queue_long" not in findings(lines, window=0)


def test_a_retraction_of_several_ranks_counts_once():
    lines = [decode(second, rank="TP8") for second in range(0, 301, 10)]
    other = [retraction(30).replace("] KV", f" TP{rank}] KV") for rank in (13, 12, 8, 9)]
    found = findings([*lines, *other * 6])["retractions"]
    assert found.evidence.startswith("6 retractions")
    assert "retractions" not in findings([*lines, *other * 5])


def test_evidence_has_no_control_sequences():
    shown = decodes(queue=2001)
    colored = [f"\x1b[32m{line[:21]}\x1b[0m{line[21:]}\x07" for line in shown]
    assert findings(colored)["queue_long"].line == shown[-1].strip()


def test_without_times_no_rate_is_claimed():
    bare = [line.partition("] ")[2] for line in minutes(600, of=5)]
    reader = logs.read(bare)
    assert "retractions" in reader.diagnosis.without_facts()
    assert reader.num_batches == len(bare) - 600


def test_values_of_a_rank():
    """A server reports the flags of the command line, its log those of a rank; in both the ranks share them."""
    given = {
        "attn_dp_size": 2,
        "max_running_requests": 8,
        "chunked_prefill_size": 512,
        "schedule_conservativeness": 1.0,
    }
    of_log = {**given, "max_running_requests": 4, "chunked_prefill_size": 256, "schedule_conservativeness": 0.3}
    for launch in (launch_of({**given, "alive_dp_ranks": [0, 1]}), logs.read([flags(**of_log)]).launch):
        assert launch.attention_ranks == 2 and launch.conservativeness == 1.0
        assert launch.of_rank("max_running_requests") == 4 and launch.of_rank("chunked_prefill_size") == 256
    unlimited = logs.read([flags(chunked_prefill_size=-1)]).launch
    assert unlimited.of_rank("chunked_prefill_size") == -1 and unlimited.of_rank("max_running_requests") is None


def test_the_ledger_gets_the_flags_of_the_command_line():
    """A log has the values of one of four attention DP ranks."""
    of_log = {"tp_size": 4, "attn_dp_size": 4, "max_running_requests": 4, "chunked_prefill_size": 256, "device": "cpu"}
    args = ledger_args(logs.read([flags(model_path=str(CHECKPOINT_DIR), **of_log)]).launch)
    assert (args.memory.max_running_requests, args.memory.chunked_prefill_size) == (16, 1024)


def test_a_log_with_two_starts():
    """Compilations and errors before the second READY belong to that start, whose sizes are its own."""
    first = [flags(tp_size=4), *weights(9.0), kv_cache(size=60.0), startup(9.0), ready(), *decodes()]
    warm_up = f"{logs.stamp(30)} DeepGEMM warmup: 100%"
    again = [flags(tp_size=4), *weights(30.0), warm_up, "Traceback:", EXTEND, OOM]
    found = findings([*first, *again])
    assert {"oom_start"} == {name for name, finding in found.items() if finding.severity == "error"}
    assert found["oom_start"].flag == "--mem-fraction-static" and "jit_after_ready" not in found
    launch = logs.read([*first, *again[:3], kv_cache(size=20.0)]).launch
    assert (launch.weights_gb, launch.kv_gb, launch.available_gb) == (30.0, 20.0, None)


def test_the_pool_of_a_drafter_is_not_the_kv_cache():
    launch = logs.read([kv_cache(size=40.0), kv_cache("float8_e4m3fn", size=1.0)]).launch
    assert (launch.kv_gb, launch.has_16_bit_kv) == (40.0, True)
    assert logs.read([flags(kv_cache_dtype="bf16")]).launch.has_16_bit_kv
