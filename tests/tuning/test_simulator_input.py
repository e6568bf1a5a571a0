"""Arrivals, traces, gaps and cost files of the simulator; the command line's errors."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from moe_engine.cli.main import main
from moe_engine.errors import ConfigError
from moe_engine.scheduler.session_hold import TAIL
from moe_engine.tuning import calibration
from moe_engine.tuning.answer import Answer
from moe_engine.tuning.answer_steps import Decode, Stream, chunks_of, common_steps
from moe_engine.tuning.calibration import VARIED_TOKENS, Probes
from moe_engine.tuning.costs.measured import CostFile, Curve, MeasuredCosts
from moe_engine.tuning.costs.step_cost import StepShape
from moe_engine.tuning.datasets import Vocabulary, random_requests, sample_length
from moe_engine.tuning.frontend_work import Sample, work_of
from moe_engine.tuning.gap_histogram import GapHistogram
from moe_engine.tuning.measured_points import (
    DECODE,
    DECODE_TOKENS,
    PREFILL,
    STREAMED,
    Limits,
    MeasuredPoints,
    ascending,
)
from moe_engine.tuning.simulator import traces
from moe_engine.tuning.simulator.arrivals import DAY, arrival_times
from moe_engine.tuning.simulator.faults import Fault
from moe_engine.tuning.simulator.traces import read_trace
from moe_engine.tuning.simulator.workload import OWN_TOKEN_BYTES, Numbers, answer_tokens
from tests.models.published import V3

AGENTS = ("--cost-file", "COSTS", "--dataset-name", "agentic")


def take(times, count):
    return [seconds for _, seconds in zip(range(count), times)]


def test_arrivals():
    rng = random.Random(random.getrandbits(32))
    gaps = {
        name: np.diff(take(arrival_times(name, 5.0, rng, burstiness=0.25), 20_000)) for name in ("poisson", "gamma")
    }
    for name, variation in (("poisson", 1.0), ("gamma", 2.0)):  # for gamma: 1 / sqrt(shape)
        assert gaps[name].mean() == pytest.approx(0.2, rel=0.08)
        assert gaps[name].std() / gaps[name].mean() == pytest.approx(variation, rel=0.12)
    assert take(arrival_times("poisson", math.inf, rng), 4) == [0.0] * 4
    day = [seconds % DAY for seconds in take(arrival_times("diurnal", 0.1, rng), 8640)]
    noon = sum(DAY / 4 < seconds < 3 * DAY / 4 for seconds in day)
    assert noon / len(day) == pytest.approx(0.5 + 0.8 / math.pi, abs=0.04)


def test_random_prompts_are_those_of_choices():
    seed, values = random.getrandbits(32), list(range(10, random.randint(20, 200_000)))
    vocabulary = Vocabulary(lambda text: [], lambda ids: "", values)
    ours, theirs, longest = random.Random(seed), random.Random(seed), random.randint(1, 3000)
    for request in random_requests(5, longest, 9, 0.5, vocabulary, ours):
        count = sample_length(longest, 0.5, theirs)
        assert request.prompt == theirs.choices(values, k=count)
        assert request.output_len == sample_length(9, 0.5, theirs)
    assert ours.getstate() == theirs.getstate()


def test_tokens_of_many_steps_are_counted_in_their_seconds():
    rng, together, single = random.Random(random.getrandbits(32)), GapHistogram(), GapHistogram()
    for _ in range(200):
        begin, gap, steps, rows = rng.uniform(0, 9), rng.uniform(0.001, 0.1), rng.randint(1, 64), rng.randint(1, 9)
        together.add_steps(begin, gap, steps, rows)
        for number in range(1, steps + 1):
            single.add(gap, rows)
            single.add_tokens(begin + number * gap, rows)
        assert together.peak_tokens == single.peak_tokens and together.num_gaps == single.num_gaps


def test_gap_histogram_against_numpy():
    rng, gaps, values = random.Random(random.getrandbits(32)), GapHistogram(), []
    for _ in range(500):
        gap, count = rng.uniform(0.001, 0.2), rng.randint(1, 9)
        gaps.add(gap, count)
        values += [gap * 1e3] * count
    found = gaps.distribution("itl")
    for q in (90, 95, 99):
        assert found[f"p{q}_itl_ms"] == pytest.approx(np.percentile(values, q, method="inverted_cdf"), abs=0.011)
    assert found["mean_itl_ms"] == pytest.approx(np.mean(values)) and found["std_itl_ms"] == pytest.approx(
        np.std(values)
    )
    assert found["median_itl_ms"] == pytest.approx(np.median(values), abs=1.0)
    assert found["max_itl_ms"] == pytest.approx(max(values), abs=0.011)


def test_traces(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 6]},
        {"timestamp": 3500, "input_length": 1024, "output_length": 8, "hash_ids": [4, 5]},
        {"arrival": 9, "input_len": 100, "output_len": 5, "max_tokens": 50, "prefix_len": 60, "prefix_id": 2},
        {"arrival": 10, "input_len": 80, "output_len": 5, "prefix_len": 60, "prefix_id": 2},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    a, b, c, d = read_trace(str(path))
    assert [round(x.seconds, 6) for x in (a, b, c, d)] == [0.0, 0.5, 6.0, 7.0]
    assert len(a.prompt_ids) == 1100 and a.prompt_ids[:1024] == b.prompt_ids
    assert c.prompt_ids[:60] == d.prompt_ids[:60] and not set(c.prompt_ids[60:]) & set(d.prompt_ids[60:])
    assert (c.output_len, c.max_tokens, d.max_tokens) == (5, 50, 5)
    assert read_trace(str(path), limit=2) == [a, b]
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(("\ufeff" + path.read_text().replace("\n", "\r\n")).encode()))
    assert read_trace(str(packed)) == [a, b, c, d]


def test_requests_without_answer_tokens_are_left_out_of_each_format(tmp_path):
    """As failed requests of a table; a session's time goes on past them."""
    path, zero = tmp_path / "trace.jsonl", random.choice([0, 0.0])
    lines = [
        {"timestamp": 1000, "input_length": 9, "output_length": 2, "session_id": "a"},
        {"delay": 500, "input_length": 12, "output_length": zero, "session_id": "a"},
        {"delay": 250, "input_length": 15, "output_length": 3, "session_id": "a"},
        {"arrival": 4, "input_len": random.choice([0, 7]), "output_len": zero},
        {"arrival": 5, "input_len": 7, "output_len": 4},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_trace(str(path), limit=3)
    assert [(x.seconds, len(x.prompt_ids), x.output_len) for x in found] == [(0, 9, 2), (0.75, 15, 3), (4, 7, 4)]
    assert found[0].conversation == found[1].conversation >= 0 and found[1].pause == 0.25
    path.write_text(json.dumps(lines[3]))
    with pytest.raises(ConfigError, match="has no request with answer tokens"):
        read_trace(str(path))


@pytest.mark.parametrize(
    "text",
    [
        "Timestamp,Model,Request tokens,Response tokens,Log Type\n5,GPT,472,18,API\n7.5,GPT,90,0,API\n8,GPT,80,9,API\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:58.6805900,472,18\n2023-11-17 00:00:01.68059,80,9\n",
    ],
)
def test_published_tables(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    assert [(round(x.seconds, 4), len(x.prompt_ids), x.output_len) for x in read_trace(str(path))] == [
        (0, 472, 18), (3, 80, 9),
    ]  # fmt: skip
    for broken, words in (("seven", "line 2: .* is 'seven'"), ("-1", "line 2"), ("", "line 2")):
        path.write_text(text.replace("472", broken))
        with pytest.raises(ConfigError, match=words):
            read_trace(str(path))
    path.write_text(text.replace("472", "0"))
    with pytest.raises(ConfigError, match=r"line 2: (Request tokens|ContextTokens) is 0"):
        read_trace(str(path))
    path.write_text(text.replace("\n5,", "\nnoon,").replace("\n2023-11-16 ", "\nnoon "))
    with pytest.raises(ConfigError, match=r"line 2: (Timestamp|TIMESTAMP) is 'noon.*; it must be seconds, or a date"):
        read_trace(str(path))
    upper = tmp_path / "TRACE.CSV"
    upper.write_text(text)
    assert len(read_trace(str(upper))) == 2
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="must have the columns"):
        read_trace(str(path))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be an object"),
        ('{"timestamp": 1e300, "input_length": 5, "output_length": 1}', "must be a number from 0 to 1e"),
        (
            '{"timestamp": 1, "input_length": 530, "output_length": 1, "hash_ids": [1, 2, 3]}',
            "3 entries.* has 2 blocks",
        ),
        ('{"timestamp": 1, "input_length": 5}', "line 2: output_length is missing"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1}', "line 2: timestamp is -1"),
        ('{"arrival": 1, "input_len": 0, "output_len": 1}', "line 2: input_len is 0"),
        ('{"arrival": 1, "input_len": "5", "output_len": 1}', "line 2: input_len is '5'"),
    ],
)
def test_broken_traces(tmp_path, line, words):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "input_len": 5, "output_len": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        read_trace(str(path))


def test_times_since_1970_in_milliseconds(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1_732_000_000_000 + more, "input_length": 5, "output_length": 1} for more in (0, 250)]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert [round(arrival.seconds, 6) for arrival in read_trace(str(path))] == [0.0, 0.25]


def test_a_compressed_trace_that_is_cut_off(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    line = b'{"arrival": 0, "input_len": 5, "output_len": 1}\n'
    path.write_bytes(gzip.compress(line * 50)[:-9])
    with pytest.raises(ConfigError, match="the compressed file is cut off"):
        read_trace(str(path))


def costs() -> CostFile:
    decode = {0: Curve((1.0, 4.0), (0.01, 0.016)), 2: Curve((1.0, 4.0), (0.02, 0.03))}
    prefill = Curve((1.0, 100.0), (0.01, 0.05))
    return CostFile(
        decode, prefill, 1e-6, 10, 2e-6, 1e-8, answer_seconds=0.002, acceptance=(0.5,), launch={"tp_size": 2}
    )


def test_cost_files(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(costs().to_json())
    assert CostFile.load(str(path)) == costs()
    model = MeasuredCosts(costs())
    assert model.step(StepShape(2, 40, 0, 0, 0, 2)).seconds == pytest.approx(0.012 + 20e-6)
    assert model.step(StepShape(7, 0, 0, 0, 0, 7)).seconds == pytest.approx(0.022)  # beyond the last measurement
    assert model.step(StepShape(1, 0, 1, 0, 0, 2)).seconds == pytest.approx(0.015)
    cached = StepShape(0, 0, 0, 100, 5050 + 1000, 100, prefill_cached=10)
    assert model.step(cached).seconds == pytest.approx(0.05 + 20e-6 + 1e-5)
    several = StepShape(0, 0, 0, 100, 2 * 1275, 100)  # two prompts of 50 tokens
    assert model.step(several).seconds == pytest.approx(0.05 - 2500e-8)
    mixed = model.step(StepShape(1, 0, 0, 100, 5050, 101)).seconds
    assert mixed == pytest.approx(0.05)  # a step has its fixed costs once


def test_parts_of_the_time_outside_the_steps():
    """Work and ways of a request add up to `answer_seconds`; a file without `entry_seconds` has them at its end."""
    work = {"request_seconds": 0.001, "results_seconds": 0.0005, "token_seconds": 0.0001}
    for entry in (0.0, 0.0004, random.uniform(0.001, 0.003)):
        file = replace(costs(), answer_seconds=0.006, entry_seconds=entry, **work)
        assert file.way_seconds + sum(work.values()) + file.delivery_seconds == pytest.approx(0.006)
        assert file.way_seconds + file.request_seconds == pytest.approx(max(entry, 0.001))
    assert replace(file, answer_seconds=0.001).delivery_seconds == 0


@pytest.mark.parametrize("text", ["", "[]", '{"version": 0}', '{"version": 1}', '{"version": 1, "decode": {"0": {}}}'])
def test_broken_cost_files(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"costs\.json"):
        CostFile.load(str(path))


def test_gaps_of_concurrent_answers():
    """Only gaps measured while all answers ran count."""
    first = Stream([0.5 + 0.01 * i for i in range(100)], 10.0, 0.0)
    second = Stream([0.5 + 0.03 * i for i in range(60)], 10.7, 0.0)
    gap, done = common_steps([first, second])[0]
    assert gap == pytest.approx(0.01)
    assert done == pytest.approx(0.845, abs=0.01)  # from 11.2 to 11.49 of 10.5 to 11.49
    assert common_steps([first, Stream(second.chunks, 20.0, 0.0)]) == []


def test_work_of_frontend_and_client():
    """Requests alone, answers beside each other in steps of 1 to 64, and under load, where a few of them share a step:
    measured with 3 % of noise. What a step costs beside its tokens does not count as work of requests."""
    request, step, chunk = random.uniform(0.5e-3, 3e-3), random.uniform(1e-4, 5e-4), random.uniform(2e-5, 8e-5)
    counts = [(128, 16, 128)] * 4  # requests, steps, chunks
    counts += [(rows, 96 + 2 * rows, rows * (96 + 2 * rows)) for rows in (1, 2, 4, 8, 16, 32, 64)]
    counts += [(100, 100 * 32 // rows, 100 * 32) for rows in (2, 4)]
    samples = [
        Sample(n, steps, sent, (n * request + steps * step + sent * chunk) * random.gauss(1, 0.03))
        for n, steps, sent in counts
    ]
    assert work_of(samples) == pytest.approx((request, step, chunk), rel=0.3)


def test_no_work_is_below_zero():
    """What the samples say of a kind cannot be true: the others explain them."""
    one, many = Sample(8, 10, 80, 0.03), Sample(8, 10, 800, 0.01)
    assert min(work_of([one, many])) == 0.0 == work_of([one, many]).chunk
    steep = [Sample(8, 8, 8, 1e-5), Sample(8, 100, 800, 8e-2), Sample(16, 100, 1600, 16e-2)]
    assert work_of(steep).request == 0.0 < work_of(steep).chunk


def test_time_that_steps_lose_to_streamed_tokens():
    """A round of streamed answers and of others; one number of requests is beside another program."""
    lost = random.uniform(1e-5, 1e-4)
    points = MeasuredPoints(Limits(64, 4000, 1 << 20, 512, range(2)))
    points.rounds.begin()
    assert points.sent_seconds() == 0.0
    for count in points.row_counts():
        points.rounds.add((DECODE, count), 1e-3 + count * 2e-5)
        points.rounds.add((STREAMED, (DECODE, count)), 1e-3 + count * (2e-5 + lost) + (count == 8))
    assert points.sent_seconds() == pytest.approx(lost)


def test_measured_curves_never_fall():
    """Against the formula of isotonic regression: the largest of the smallest means of all ranges around a value."""
    values = [random.gauss(i, 2.0) for i in range(random.randint(1, 12))]
    found, places = ascending(values), range(len(values))
    for i in places:
        least = [min(sum(values[j : k + 1]) / (k + 1 - j) for k in places if k >= i) for j in range(i + 1)]
        assert found[i] == pytest.approx(max(least))


def test_chunks_of_several_tokens():
    counts = [random.randint(1, 4) for _ in range(random.randint(1, 9))]
    moments = [0.1]
    answer = Answer(3, ttft=0.1)
    for count in counts[1:]:
        gap = random.uniform(0.001, 0.01)
        moments.append(moments[-1] + gap)
        answer.itl += [gap / count] * count
    assert chunks_of(answer, counts) == pytest.approx(moments)


def test_long_contexts_fit_into_a_small_pool():
    """Contexts cost too where the pool has no room for long ones of eight requests."""
    for pool in (1500, 2048, 4096, 1 << 20):
        points = MeasuredPoints(Limits(64, 4000, pool, 512, range(2)))
        points.rounds.begin()
        for length in points.prompt_lengths():
            points.rounds.add((PREFILL, length), 1e-3)
        points.decodes = {count: [Decode(1e-3, 80.0)] for count in points.row_counts()}
        found = points.long_decode()
        assert found is not None and found[1] >= 160 and found[0] * (found[1] + DECODE_TOKENS) < pool
        assert found[0] == 8 or found[0] * 2 * (160 + 2 * DECODE_TOKENS) > pool  # as many as fit


@pytest.mark.parametrize("groups", [1, 2])
def test_a_jump_of_the_decodes_is_measured_on_both_sides(groups: int):
    """A kernel that takes so many tokens in one call: both sides of its limit are points; a line has no more points."""
    limit, jump = random.randint(9, 63), random.choice([0.0, random.uniform(0.4, 2.0)])
    points = MeasuredPoints(Limits(64 * groups, 4000, 1 << 20, 512, range(2), num_groups=groups))
    points.rounds.begin()
    before = points.row_counts()

    def measure(count: int) -> None:
        rows = count // groups
        points.rounds.add((DECODE, count), (1 + rows / 10) * (1 + jump * (rows > limit)) * random.uniform(0.99, 1.01))

    for count in before:
        measure(count)
    while (count := points.halve_jump()) is not None:
        measure(count)
    counts = points.row_counts()
    assert counts == sorted(counts) and len(counts) <= len(before) + (4 if jump else 0)
    assert not jump or {limit * groups, (limit + 1) * groups} <= {*counts}


def test_acceptance_that_explains_the_accepted_drafts():
    points = MeasuredPoints(Limits(1, 1, 1, 1, range(2), drafts=3))
    rate = random.uniform(0.2, 0.9)
    points.steps, points.accepted = 1000, 1000 * (rate + rate**2 + rate**3)
    assert points.acceptance() == pytest.approx((rate,) * 3, abs=1e-5)


def test_acceptance_is_that_of_the_beginning_of_an_answer(monkeypatch: pytest.MonkeyPatch):
    """An answer to random tokens ends in a loop, whose drafts are all accepted."""

    async def ask(request, options, seen):
        assert options.stream
        answer, steps, correct = Answer(request.prompt_len, success=True, ttft=0.1), 0, 0
        seen({"completion_tokens": 1}, 1)
        total = 1
        while total < request.output_len:
            count = 3 if total >= VARIED_TOKENS else 1 + steps % 2 if request.output_len > 4 else 1
            total, steps, correct = total + count, steps + 1, correct + count - 1
            meta = {"completion_tokens": total, "spec_verify_ct": steps, "spec_num_correct_drafts": correct}
            seen(meta | {"spec_accept_length": 1 + correct / steps}, count)
            answer.itl += [0.01] * count
        return answer

    monkeypatch.setattr(calibration, "ask_native", ask)
    probes = Probes("", Limits(8, 100, 1000, 100, range(9), drafts=2), lambda: 0.0)
    for tokens in (4, 4, 4, 4, 4, 4, 4, 4, VARIED_TOKENS, 1000):
        asyncio.run(probes._ask([1, 2, 3], tokens))
    points = probes._points
    assert points.accepted / points.steps == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("text", ["rank=1", "rank=9@t=3s", "rank=-1@t=3s", "rank=1@t=3d", "1@3"])
def test_faults_that_cannot_be_read(text):
    with pytest.raises(ConfigError, match="--fail"):
        Fault.parse(text, 8)


def test_simulate_command(tmp_path, capsys):
    path, out = tmp_path / "costs.json", tmp_path / "out.json"
    path.write_text(costs().to_json())
    flags = ["--cost-file", str(path), "--num-prompts", "30", "--request-rate", "20", "--random-output-len", "20"]
    assert main(["simulate", *flags, "--random-input-len", "50", "--output-file", str(out)]) == 0
    shown, notes = capsys.readouterr()
    assert "measured with --tp-size 2 (here not given); calibrate this launch" in notes  # as the file says
    values = json.loads(out.read_text())
    assert "Serving Benchmark Result" in shown and values["completed"] == 30 and values["times_real_time"] > 0
    assert values["median_ttft_ms"] > 12 and values["total_output_tokens"] <= 30 * 20
    assert "may be wrong" not in notes
    path.write_text(replace(costs(), conditions={"disturbed": "other programs took 30 %"}).to_json())
    assert main(["simulate", *flags]) == 0
    assert f"{path} may be wrong: other programs took 30 %; calibrate again" in capsys.readouterr().err


def test_changes_of_the_autopilot_are_shown(tmp_path, capsys):
    path = tmp_path / "costs.json"
    path.write_text(costs().to_json())
    flags = ["--cost-file", str(path), "--num-prompts", "400", "--request-rate", "200", "--max-total-tokens", "4096"]
    shared = ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "8", "--gsp-prompts-per-group", "60"]
    assert main(["simulate", *flags, *shared, "--gsp-system-prompt-len", "300", "--gsp-output-len", "30"]) == 0
    assert "Autopilot" not in capsys.readouterr().err
    assert main(["simulate", "--autopilot", *flags, *shared, "--gsp-system-prompt-len", "300"]) == 0
    assert " s] Autopilot: schedule_policy fcfs -> lpm: " in capsys.readouterr().err


def test_the_first_requests_of_a_longer_trace(tmp_path, capsys):
    path, trace, out = tmp_path / "costs.json", tmp_path / "trace.jsonl", tmp_path / "out.json"
    path.write_text(costs().to_json())
    trace.write_text('{"arrival": 0, "input_len": 5, "output_len": 1}\n' * 5)
    flags = ["--cost-file", str(path), "--dataset-name", "trace", "--dataset-path", str(trace)]
    for count, noted in ((3, True), (5, False)):
        assert main(["simulate", *flags, "--num-prompts", str(count), "--output-file", str(out)]) == 0
        shown, notes = capsys.readouterr()
        assert json.loads(out.read_text())["completed"] == count and ("--num-prompts N takes more" in notes) == noted
        assert "Traffic request rate:                    trace" in shown


def test_answers_beyond_the_context_are_counted(tmp_path, capsys):
    path, trace, out = tmp_path / "costs.json", tmp_path / "trace.jsonl", tmp_path / "out.json"
    path.write_text(costs().to_json())
    trace.write_text("".join(f'{{"arrival": 0, "input_len": 5, "output_len": {n}}}\n' for n in (58, 59, 60, 90)))
    flags = ["--cost-file", str(path), "--dataset-name", "trace", "--dataset-path", str(trace), "--output-file"]
    for length, cut, tokens in ((64, 2, 58 + 59 + 59 + 59), (95, 0, 58 + 59 + 60 + 90)):
        assert main(["simulate", *flags, str(out), "--context-length", str(length)]) == 0
        values, shown = json.loads(out.read_text()), capsys.readouterr().out
        assert (values["completed"], values["cut_answers"], values["total_output_tokens"]) == (4, cut, tokens)
        assert (f"{cut} answers are shorter than in the load" in shown) == (cut > 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "give either --cost-file FILE"),
        (["--cost-file", "COSTS", "--num-prompts", "-3"], "--num-prompts is -3"),
        (["--cost-file", "COSTS", "--num-prompts", str(10**10)], "--num-prompts is 10000000000: these requests take"),
        (
            ["--cost-file", "COSTS", "--num-prompts", str(10**10), "--request-rate", "9"],
            "--num-prompts is 10000000000: these requests take 5587.94 GB of memory",
        ),
        (
            ["--cost-file", "COSTS", "--dataset-name", "generated-shared-prefix", "--gsp-num-groups", str(10**9)],
            "--gsp-num-groups x --gsp-prompts-per-group is 16000000000: these requests take",
        ),
        (
            [*AGENTS, "--agent-sessions", "2000000", "--agent-turns", "9999"],
            "--agent-sessions x requests of a session is 19998000000: these requests take",
        ),
        ([*AGENTS, "--num-prompts", "-3"], "--num-prompts is -3"),
        ([*AGENTS, "--num-prompts", str(10**12)], "--num-prompts / requests of a session is"),
        (
            [*AGENTS, "--num-prompts", str(10**10), "--agent-turns", "9999"],
            "--num-prompts is 9999999900: these requests",
        ),
        (
            [*AGENTS, "--agent-sessions", "2000000", "--agent-groups", "99999", "--agent-system-len", "999999"],
            "--agent-groups is 99999: these system prompts take",
        ),
        (["--cost-file", "COSTS", "--request-rate", "0"], "--request-rate is 0"),
        (["--cost-file", "COSTS", "--request-rate", "nan"], "--request-rate is nan"),
        (["--cost-file", "COSTS", "--speculative-algorithm", "NEXTN", "--acceptance", "0.5,2"], "--acceptance 0.5,2"),
        (["--cost-file", "COSTS", "--acceptance", "0.5"], "--acceptance 0.5: this launch has no drafts"),
        (["--cost-file", "COSTS", "--fail", "rank=3@t=1s"], "ranks 0 to 0"),
        (["--cost-file", "COSTS", "--dataset-name", "trace", "--dataset-path", "nowhere"], "nowhere"),
        (["--cost-file", "COSTS", "--dataset-name", "sharegpt"], "--dataset-path"),
        (
            ["--cost-file", "COSTS", "--dataset-name", "trace", "--dataset-path", "x", "--request-rate", "4"],
            "leave it out",
        ),
        (["--cost-file", "COSTS", "--arrivals", "gamma"], "--request-rate"),
        (["--cost-file", "COSTS", "--request-rate", "4", "--burstiness", "0.5"], "only --arrivals gamma has it"),
        (["--cost-file", "COSTS", "--like", "vllm"], "--like vllm: measured step costs"),
        (["--cost-file", "COSTS", "--goodput", "x:1"], "--goodput"),
        (["--cost-file", "COSTS", "--output-details"], "--output-file FILE.json"),
        (
            ["--cost-file", "COSTS", "--disaggregation-mode", "prefill"],
            "--disaggregation-mode prefill: a simulation has",
        ),
        (["--cost-file", "nowhere.json"], "nowhere.json"),
        (["--cost-file", "COSTS", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_simulate_refuses(tmp_path, capsys, flags, words):
    path = tmp_path / "costs.json"
    path.write_text(costs().to_json())
    given = [str(path) if flag == "COSTS" else flag for flag in flags]
    assert main(["simulate", *given]) == 2
    message = capsys.readouterr().err
    assert words in message and "Traceback" not in message


def test_a_trace_that_memory_cannot_hold_is_one_line(tmp_path, capsys, monkeypatch):
    path, trace = tmp_path / "costs.json", tmp_path / "trace.jsonl"
    path.write_text(costs().to_json())
    trace.write_text("".join(f'{{"arrival": {i}, "input_len": 500, "output_len": 2}}\n' for i in range(9)))
    flags = ["--cost-file", str(path), "--dataset-name", "trace", "--dataset-path", str(trace)]
    monkeypatch.setattr(traces, "host_memory", lambda: SimpleNamespace(available_bytes=1600 * OWN_TOKEN_BYTES))
    assert main(["simulate", *flags]) == 2
    problem = "the prompts of its first 4 requests have 2000 tokens, of which 1600 fit into memory"
    assert capsys.readouterr().err.endswith(f"--dataset-path {trace}: {problem}; give a smaller --num-prompts\n")
    assert main(["simulate", *flags, "--num-prompts", "2"]) == 0


def test_simulated_texts_have_the_tokens_of_the_embedded_model(tmp_path, capsys):
    """Without --model-path, as with a hub id, the tokenizer is in the folder where the model was found."""
    path, out = tmp_path / "texts.json", tmp_path / "out.json"
    turns = [{"value": "What is the capital of France?"}, {"value": "The capital of France is Paris."}]
    path.write_text(json.dumps([{"conversations": turns}] * 3))
    data = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "3"]
    assert main(["simulate", "--hardware", "8xH200", *data, "--output-file", str(out)]) == 0, capsys.readouterr().err
    assert json.loads(out.read_text())["completed"] == 3


def test_simulate_for_other_hardware(tmp_path, capsys):
    """Costs of the planner, from a bare config.json: several attention groups answer more requests, each single request
    later."""
    path, out = tmp_path / "config.json", tmp_path / "out.json"
    path.write_text(json.dumps(V3))
    flags = ["--model-path", str(path), "--hardware", "8xH200", "--output-file", str(out)]
    flags += ["--random-input-len", "500", "--random-output-len", "60"]
    groups = ["--attn-dp-size", "8", "--ep-size", "8", "--moe-a2a-backend", "auto"]

    def figure(name, count, form):
        assert main(["simulate", *flags, "--tp", "8", "--num-prompts", str(count), *form]) == 0
        return json.loads(out.read_text())[name]

    assert figure("output_throughput", 300, groups) > figure("output_throughput", 300, [])
    assert figure("median_itl_ms", 1, groups) > figure("median_itl_ms", 1, [])
    capsys.readouterr()
    assert main(["simulate", "--model-path", str(path), "--hardware", "2xH200", "--tp", "8"]) == 2
    assert "--hardware has 2" in capsys.readouterr().err


def test_parts_of_answers_that_tell_requests_and_sessions_apart_occur_in_no_other_answer() -> None:
    numbers = Numbers()
    lengths = [random.randint(1, 90) for _ in range(30)]
    starts = [numbers.take(length + 1) for length in lengths]
    answers = [answer_tokens(number, 0, length) for number, length in zip(starts, lengths)]
    for number, answer in zip(starts, answers):
        begin = random.randint(0, len(answer))
        end = random.randint(begin, len(answer))
        assert answer_tokens(number, begin, end) == answer[begin:end] and answer[0] == number
    windows = [tuple(answer[max(end - TAIL, 0) : end]) for answer in answers for end in range(1, len(answer) + 1)]
    assert len(set(windows)) == len(windows) == sum(lengths)
