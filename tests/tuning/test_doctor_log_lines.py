"""Lines of a server's log: every documented spelling, times, ranks, damage."""

from __future__ import annotations

import json
import math
import random
import time
import tracemalloc
import warnings

import pytest

from moe_engine import logs as own_logs
from moe_engine.scheduler import log_lines as own_lines
from moe_engine.scheduler.events import PlanFacts
from moe_engine.tuning.doctor import log_lines
from moe_engine.tuning.doctor.diagnosis import Diagnosis
from moe_engine.tuning.doctor.log_lines import BrokenLine, parse, server_args, split_glued
from moe_engine.tuning.doctor.log_reader import LogReader
from moe_engine.tuning.doctor.window import MEDIANS
from tests.tuning import logs

OLD = "Decode batch. #running-req: 5, #token: 1938, token usage: 0.24, gen throughput (token/s): 80.12, #queue-req: 3, "
SEEDS = (
    "Decode batch. #running-req: 233, #token: 370959, token usage: 0.82, cuda graph: True, gen throughput (token/s): "
    "4594.01, #queue-req: 317, "
)
PD = (
    "Decode batch [41], #running-req: 7, #token: 99, token usage: 0.11, accept len: 2.40, accept rate: 0.47, "
    "pre-allocated usage: 0.00, #prealloc-req: 0, #transfer-req: 0, #retracted-req: 2, cuda graph: False, gen "
    "throughput (token/s): 12.00, #queue-req: 0, "
)
NEW = (
    "Decode batch, #running-req: 8, #full token: 100, full token usage: 0.30, #swa token: 90, swa token usage: 0.80, "
    "cuda graph: True, gen throughput (token/s): 99.50, #queue-req: 2"
)
HISPARSE = (
    "Decode batch, #running-req: 8, #gpu token: 50, gpu token usage: 0.81, #cpu token: 700, cpu token usage: 0.20, "
    "cuda graph: True, gen throughput (token/s): 99.50, #queue-req: 2, est. decode TFLOPS/s (per GPU): 12.30, "
    "fwd occupancy: 91.20%"
)
NEW_PREFILL = (
    "Prefill batch [7], #new-seq: 2, #new-token: 300, #cached-token: 64, full token usage: 0.10, mamba usage: 0.70, "
    "#running-req: 5, #queue-req: 7, #pending-token: 99, #bootstrap-req: 2, #inflight-req: 3, cuda graph: False, input "
    "throughput (token/s): 45.30, fwd occupancy: 91.20%"
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (OLD, {"running": 5, "usage": 0.24, "queue": 3, "throughput": 80.12}),
        (SEEDS, {"running": 233, "tokens": 370959, "usage": 0.82, "cuda_graph": 1, "queue": 317}),
        (PD, {"running": 7, "accept_len": 2.4, "accept_rate": 0.47, "cuda_graph": 0, "retracted": 2}),
        (NEW, {"running": 8, "usage": 0.8, "kv_usage": 0.3, "swa_usage": 0.8, "tokens": 100, "queue": 2}),
        (NEW.replace("cuda graph: True", "musa graph: False"), {"cuda_graph": 0}),
        (logs.pools(0, 0.3, mamba=0.9), {"usage": 0.9, "kv_usage": 0.3, "mamba_usage": 0.9, "queue": 9}),
        (logs.decode_server(0), {"usage": 0.97, "preallocated": 0.7, "prealloc": 21, "queue": 0}),
        (HISPARSE, {"running": 8, "usage": 0.81, "tokens": 50, "cuda_graph": 1, "queue": 2}),
        (NEW_PREFILL, {"new_token": 300, "usage": 0.7, "pending_token": 99, "cuda_graph": 0, "queue": 7}),
        (logs.prefill(0, new=71, cached=9, seqs=2), {"new_token": 71, "cached_token": 9, "new_seq": 2}),
        (
            "Prefill batch. #new-seq: 9, #new-token: 8192, #cached-token: 27, token usage: 0.00, #running-req: 0, "
            "#queue-req: 114, ",
            {"new_token": 8192, "cached_token": 27, "queue": 114},
        ),
    ],
)
def test_spellings(line, expected):
    values = parse(line).values
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[2025-08-11 17:17:03] ", ""),
        ("[2025-08-11 17:17:03 TP0] ", "TP0"),
        ("[2025-08-11 17:17:03 DP3 TP12 EP12] ", "DP3 TP12 EP12"),
        ("[2025-08-11 17:17:03.000 DP0 PP1 TP0] ", "DP0 PP1 TP0"),
        ("2025-08-11T17:17:09.123456789Z [2025-08-11 17:17:03 DP1 TP4] ", "DP1 TP4"),
        ("node3: [2025-08-11 17:17:03 ATTN_CP1 TP0] ", "ATTN_CP1 TP0"),
        ("[2025-08-11 17:17:03] [2025-08-11 08:17:02 DP2 TP8] ", "DP2 TP8"),
        ("2025-08-11 17:17:03 DP1 TP0] ", "DP1 TP0"),
        ("2025-08-11 17:17:03 INFO 31 [DP3 TP3 EP3 metrics.py:222] ", "DP3 TP3 EP3"),
        ("2025-08-11 17:17:03 INFO 31 [metrics.py:222] ", ""),
        ("2025-08-11 17:17:03,000 - INFO - ", ""),
        ("2025-08-11T17:17:03Z stderr F ", ""),
    ],
)
def test_times_and_ranks(prefix, rank):
    for line in (SEEDS, PD, OLD):
        event = parse(prefix + line)
        assert (time.gmtime(event.time)[:6], event.rank) == ((2025, 8, 11, 17, 17, 3), rank)


def test_other_times():
    later, earlier = (parse(f"{when} node1 sglang[41]: {OLD}").time for when in ("Aug 11 17:18:03", "Aug 11 17:17:03"))
    assert later - earlier == 60
    assert parse(f"[17:17:03 TP0] {OLD}").rank == "TP0"
    assert parse(OLD).time is None


def test_clock_times_go_past_midnight():
    reader = logs.read([f"[{clock} TP0] {OLD}" for clock in ("23:59:58", "23:59:59", "00:00:03")])
    assert reader.diagnosis.num_windows == 1
    window = logs.read([f"[23:5{n}:00] {OLD}" for n in range(6)] + [f"[00:0{n}:00] {OLD}" for n in range(6)], 300)
    assert window.diagnosis.num_windows == 4


def test_own_lines_are_read_back():
    """Lines of this engine with random values."""
    for _ in range(50):
        facts = PlanFacts(
            number=1, new_seq=random.randrange(9), new_token=random.randrange(9999), cached_token=random.randrange(999),
            num_decodes=random.randrange(999), num_running=random.randrange(999), num_queued=random.randrange(9999),
            num_used=random.randrange(10**7), token_usage=random.randrange(101) / 100,
            prompt_logprobs=False,
        )  # fmt: skip
        accept = random.choice((None, random.randrange(100, 700) / 100))
        line = own_lines.decode_line(facts, 12.34, cuda_graph=random.random() < 0.5, accept_len=accept)
        values = parse(f"{logs.stamp(5, 'DP1 TP2')} {line}").values
        shown = facts.num_decodes, facts.token_usage, facts.num_queued, accept, float("graph: True" in line), 12.34
        names = "running", "usage", "queue", "accept_len", "cuda_graph", "throughput"
        assert tuple(values.get(name) for name in names) == shown
        values = parse(own_lines.prefill_line(facts)).values
        names = "new_seq", "new_token", "cached_token", "running", "queue"
        shown = facts.new_seq, facts.new_token, facts.cached_token, facts.num_running, facts.num_queued
        assert tuple(values[name] for name in names) == shown
    assert parse(own_lines.retract_line(3, 0.4, 0.8)).values == {"retracted": 3, "ratio": 0.8}
    summary = own_logs.startup_line(1000, 2048, 16384, 256, 4096, 22.561)
    assert parse(summary).values["available_gpu_mem"] == 22.56
    assert parse(own_logs.kv_line("bfloat16", 1000, 4.0, is_mla=False)).values["gb"] == 4.0
    assert parse(own_logs.load_end_line(1.0, "X", "bfloat16", 20.0, 3.5)).values["used"] == 3.5
    assert parse(own_logs.READY_LINE).kind == "ready"


def test_the_quick_reading_of_usual_lines_agrees(monkeypatch):
    lines = [
        logs.decode(
            random.randrange(10**6), running=random.randrange(5000), usage=random.random(), queue=random.randrange(999),
            graph=random.random() < 0.5, rank=random.choice(("", "TP0", "DP3 TP3")),
        )
        for _ in range(30)
    ]  # fmt: skip
    lines += [
        logs.prefill(random.randrange(10**6), new=random.randrange(9999), cached=random.randrange(999), rank="DP1 TP4")
        for _ in range(9)
    ]
    own = PlanFacts(1, 2, 3, 4, 5, 6, 7, 8, 0.25, 0, False)
    lines.append(f"{logs.stamp(9)} {own_lines.prefill_line(own)}")
    quick = [parse(line) for line in lines]
    monkeypatch.setattr(log_lines, "_USUAL_DECODE", log_lines.re.compile("(?!)"))
    monkeypatch.setattr(log_lines, "_USUAL_PREFILL", log_lines.re.compile("(?!)"))
    for line, event in zip(lines, quick):
        slow = parse(line)
        read = event.values.keys()
        assert (slow.kind, slow.time, slow.rank) == (event.kind, event.time, event.rank)
        assert {name: slow.values[name] for name in read} == event.values
        assert slow.values.keys() - read <= {"pending_token", "input_throughput", "cuda_graph"}


def test_lines_of_a_prefill_server():
    line = (
        "[2025-10-15 14:44:32 DP14 TP14 EP14] Prefill batch. #new-seq: 2, #new-token: 68, #cached-token: 12, token "
        "usage: 0.01, #unbootstrapped-req: 0, #queue-req: 3, #transferring-req: 1, input throughput (token/s): 1.50, "
    )
    event = parse(line)
    assert (event.kind, event.rank) == ("prefill", "DP14 TP14 EP14")
    assert [event.values[name] for name in ("new_token", "cached_token", "queue", "running")] == [68, 12, 3, 0]
    with pytest.raises(BrokenLine):
        parse(line[: line.index("#queue-req")])


def test_the_cache_of_old_releases_has_no_type_in_its_line():
    event = parse("[2025-04-01 10:00:00 TP0] KV Cache is allocated. #tokens: 4000, K size: 2.50 GB, V size: 2.50 GB")
    assert event.values == {"dtype": None, "tokens": 4000, "gb": 5.0}


def test_broken_lines_are_counted():
    whole = logs.decode(3, rank="TP0")
    first = whole.index("Decode batch") + len("Decode batch")
    broken = 0
    for end in range(first, whole.index("#queue-req: 200") + len("#queue-req:")):
        with pytest.raises(BrokenLine):
            parse(whole[:end])
        broken += 1
    for damaged in ("token usage: 0..9", "token usage: nan", "token usage: -1", "token usage: 1e999"):
        with pytest.raises(BrokenLine):
            parse(whole.replace("token usage: 0.95", damaged))
    lines = [whole[:end] for end in range(first, first + 30)] + [whole] * 3 + ["\x00\xff garbage", ""]
    reader = logs.read(lines)
    assert (reader.num_broken, reader.num_batches, reader.num_lines) == (30, 3, 35)
    assert broken > 50


@pytest.mark.parametrize("text", ["Decode batch sizes are fine", "INFO: Prefill batch ran", "a b c", ""])
def test_other_lines_are_neither_read_nor_broken(text):
    assert parse(text) is None


def test_glued_lines():
    glued = logs.decode(1, rank="DP0 TP0") + logs.decode(1, rank="DP1 TP1") + logs.decode(2, rank="DP0 TP0")[:60]
    assert len(split_glued(glued)) == 3
    reader = logs.read([glued])
    assert (reader.num_batches, reader.num_broken) == (2, 1)


def test_a_batch_of_several_ranks_counts_once():
    """Reports of all ranks of one attention group count once; each group of DP attention counts."""
    lines = [logs.decode(s, rank=f"DP{dp} TP{2 * dp + tp}") for s in range(5) for dp in (0, 1) for tp in (0, 1)]
    assert logs.read(lines).num_batches == 10


LINES = [
    logs.decode(3, rank="DP1 TP4"), logs.prefill(4, rank="DP1 TP4"), f"{logs.stamp(5, 'TP0')} {NEW}",
    f"{logs.stamp(5, 'TP0')} {NEW_PREFILL}", logs.flags(tp_size=8, note="it's"), logs.startup(), *logs.weights(10.0),
    logs.kv_cache(), logs.retraction(6), logs.ready(), f"{logs.stamp(7)} Decode out of memory.",
]  # fmt: skip


@pytest.mark.parametrize(
    "wrap",
    [
        lambda line: json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2025-08-11T17:17:09.1Z"}),
        lambda line: json.dumps({"level": "INFO", "message": line}, separators=(",", ":")) + "\r\n",
        lambda line: "2025-08-11T17:17:09.1Z stdout F " + json.dumps({"msg": line}),
        lambda line: json.dumps({"pod": {"name": "a"}, "jsonPayload": {"message": line}}),
        lambda line: json.dumps({"log": json.dumps({"message": line}) + "\n"}),
        lambda line: "\rCapturing batches: 100%|" + "#" * 250 + f"| 52/52 [00:04<00:00, 10.83it/s]{line}",
        lambda line: f"\x1b[32m{line}\x1b[0m\n",
        lambda line: line.replace("batch", "\x1b[1;36mbatch\x1b[0m").replace("=", "\x1b[2m=\x1b[0m"),
        lambda line: f"\x1b[36m(Engine pid=41, ip=10.0.0.3)\x1b[0m {line} [repeated 7x across cluster]",
    ],
    ids=["docker", "json", "json-in-kubernetes", "nested", "json-in-docker", "bar", "color", "colors", "ray"],
)
def test_lines_that_others_wrapped(wrap):
    for line in LINES:
        found, plain = parse(log_lines.unwrapped(wrap(line))), parse(line)
        assert found[:3] == plain[:3] and found.values.items() >= plain.values.items()


def test_the_time_of_the_wrapper():
    for name in ("time", "@timestamp", "asctime", "ts"):
        for value in ("2025-08-11T17:17:03Z", logs.BEGAN, logs.BEGAN * 1000, logs.BEGAN * 10**9):
            line = log_lines.unwrapped(json.dumps({name: value, "message": OLD}))
            assert time.gmtime(parse(line).time)[:6] == (2025, 8, 11, 17, 17, 3)
    for value in (-1, math.inf, math.nan, 10**400):
        assert parse(log_lines.unwrapped(json.dumps({"ts": value, "message": OLD}))).time is None


@pytest.mark.parametrize("quote", ['"{}"', '2025-08-11T17:17:03Z,"{}"', '    "textPayload": "{}",', "`{}`", '"{}\\n",'])
def test_exports_with_quotation_marks(quote):
    """The last value of new releases ends the line, without a comma."""
    for line in (NEW, NEW_PREFILL, f"{logs.stamp(3, 'TP0')} {NEW}"):
        assert parse(quote.format(line)).values == parse(line).values


def test_other_objects_stay_as_they_are():
    for line in ('{"message": 3}', '{"a": "b"}', '{"message": "cut', "no object"):
        assert log_lines.unwrapped(line) == line


def test_damaged_lines_are_read_or_counted():
    """Cut, repeated and mixed lines: no other error, and no output."""
    for _ in range(300):
        line = random.choice(LINES)
        for _ in range(random.randrange(1, 4)):
            first, last = sorted(random.randrange(len(line) + 1) for _ in range(2))
            more = random.choice((line[first:last], random.choice(LINES), "9" * 5000, "..", "1O", '"', "\x1b[0m", ""))
            line = line[:first] + more + line[random.choice((first, last)) :]
        with warnings.catch_warnings(action="error"):
            assert logs.read([line]).num_lines == 1


def test_server_args():
    text = "ServerArgs(model_path='/m', tp_size=8, ranks=[1, 2], x=None, y=<object at 0x>)"
    with pytest.raises(BrokenLine):
        server_args(text)
    found = server_args("ServerArgs(model_path='/m', tp_size=8, ranks=[1, 2], x=None, y=Other(3))")
    assert found == {"model_path": "/m", "tp_size": 8, "ranks": [1, 2], "x": None, "y": None}
    assert server_args('{"page_size": 64}') == {"page_size": 64}
    assert parse(logs.flags(page_size=3)).values["page_size"] == 3


def test_a_long_window_holds_little():
    """With --window 0 the lines of a gigabyte are one window: some values of 8 bytes for each line."""
    reader, count = LogReader(Diagnosis(), 0), 20_000
    lines = (logs.decode(n // 20, running=n % 300, usage=n % 89 / 100, queue=n) for n in range(count))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        reader.read(lines)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held / count < len(MEDIANS) * 8 * 1.2
