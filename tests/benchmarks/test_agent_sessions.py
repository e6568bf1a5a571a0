"""Agent sessions: generation by seed, traces, order of turns and pauses on a virtual clock, the metric by hand."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import pairwise

import pytest

from benchmarks import agent_report, serving
from benchmarks.agent_sessions import Replay, TokenText, workload_of
from moe_engine.tuning.answer import Answer
from moe_engine.tuning.datasets import Vocabulary
from moe_engine.tuning.simulator.agents import Agents, AgentShape
from moe_engine.tuning.simulator.sessions import Recorded, link_sessions
from moe_engine.tuning.simulator.traces import MOONCAKE_BLOCK, read_trace
from moe_engine.tuning.simulator.workload import answer_tokens
from tests.benchmarks import virtual_time
from tests.e2e.server_process import ServerProcess

VOCABULARY = Vocabulary(lambda text: [7] * len(text), lambda ids: "", list(range(100, 1100)))
SHAPE = AgentShape(turns=4, system_len=6, input_len=5, output_len=4, pause=2.0, groups=2, subagents=2, subagent_turns=2)


def sessions_of(shape: AgentShape, seed: int, order: random.Random, count: int = 5) -> dict[int, list]:
    """The requests of each session, with answers that end in random order, each after a second."""
    workload = Agents(shape, iter([0.0] * count), count, seed)
    running = list(workload.first())
    found: dict[int, list] = {arrival.conversation: [] for arrival in running}
    while running:
        arrival = running.pop(order.randrange(len(running)))
        found[arrival.conversation].append(arrival)
        follower = workload.after(arrival, arrival.seconds + 1.0)
        running += [follower] if follower is not None else []
    assert sum(map(len, found.values())) == workload.total
    return found


def test_sessions_depend_on_the_seed_alone():
    seed = random.getrandbits(32)
    one, two, other = (sessions_of(SHAPE, s, random.Random(random.getrandbits(63))) for s in (seed, seed, seed + 1))
    assert one == two and one != other
    for arrivals in one.values():
        main = [arrival for arrival in arrivals if not arrival.subagent]
        assert [arrival.turn for arrival in main] == [0, 1, 2, 3]
        assert len(arrivals) == SHAPE.requests == 8
        for before, after in pairwise(main):
            answer = answer_tokens(before.answer_ids, 0, before.output_len)
            assert after.prompt_ids[: len(before.prompt_ids) + before.output_len] == before.prompt_ids + answer
    assert one[0][0].prompt_ids[:6] == one[2][0].prompt_ids[:6] != one[1][0].prompt_ids[:6]  # two groups


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_subagents_begin_with_the_text_of_their_parent_or_the_system_prompt(share):
    shape = AgentShape(**{**vars(SHAPE), "fork_share": share})
    for arrivals in sessions_of(shape, 3, random.Random(1)).values():
        for i, arrival in enumerate(arrivals):
            if not arrival.subagent or arrival.turn:
                continue
            parent = [a for a in arrivals[:i] if not a.subagent][-1]
            shared = parent.prompt_ids if share else parent.prompt_ids[:6]
            assert arrival.prompt_ids[: len(shared)] == shared
            assert (arrival.prompt_ids[6] == parent.prompt_ids[6]) == bool(share)
            assert arrival.seconds == arrivals[i - 1].seconds + 1.0  # a tool: without a pause


@pytest.mark.parametrize("name", ["exponential", "lognormal"])
def test_pauses_have_their_mean(name):
    shape = AgentShape(turns=400, system_len=0, input_len=1, output_len=1, pause=3.0, pause_distribution=name)
    found = sessions_of(shape, random.getrandbits(32), random.Random(random.getrandbits(63)), count=6)
    pauses = [b.seconds - a.seconds - 1 for session in found.values() for a, b in pairwise(session)]
    assert sum(pauses) / len(pauses) == pytest.approx(3.0, rel=0.2)
    assert min(pauses) >= 0 and len(set(pauses)) > 2000


class FakeServer:
    """Answers after one second per ten prompt tokens; records the time of each request."""

    def __init__(self, fail: int | None = None) -> None:
        self.seen: list[tuple[float, float, list[int]]] = []
        self.open = self.most = 0
        self._fail, self._next = fail, 5000

    async def __call__(self, request):
        clock = asyncio.get_running_loop()
        began, self.open = clock.time(), self.open + 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(request.prompt_len / 10)
        self.open -= 1
        self.seen.append((began, clock.time(), request.prompt))
        if len(self.seen) == self._fail:
            return Answer(request.prompt_len, error="HTTP 500")
        ids = list(range(self._next, self._next + request.output_len))
        self._next += request.output_len
        return Answer(request.prompt_len, request.output_len, True, latency=request.prompt_len / 10, output_ids=ids)


def replayed(workload, server, concurrency=None):
    replay = Replay(workload, server, TokenText(VOCABULARY, "salt"), VOCABULARY.encode, concurrency)
    seconds = virtual_time.run(replay.run())
    return replay, seconds


def test_a_turn_is_sent_after_the_answer_and_its_pause():
    shape = AgentShape(turns=3, system_len=4, input_len=4, output_len=3, pause=7.0, pause_distribution="constant")
    server = FakeServer()
    replay, seconds = replayed(Agents(shape, iter([2.5]), 1, seed=5), server)
    assert [turn.kind for turn in replay.turns] == ["first", "returning", "returning"]
    assert server.seen[0][0] == pytest.approx(2.5) and seconds == pytest.approx(server.seen[-1][1])
    for (_, ended, prompt), (began, _, later), turn in zip(server.seen, server.seen[1:], replay.turns):
        assert began == pytest.approx(ended + 7.0)
        assert later[: len(prompt)] == prompt
        output = turn.answer.output_ids
        assert later[len(prompt) : len(prompt) + len(output)] == output  # the server's answer


def test_sessions_are_limited_and_a_failure_ends_its_session():
    server = FakeServer()
    replay, _ = replayed(Agents(SHAPE, iter([0.0] * 5), 5, seed=1), server, concurrency=2)
    assert server.most == 2 and len(replay.turns) == 5 * SHAPE.requests
    began: dict[int, int] = {}
    for i, turn in enumerate(replay.turns):
        began.setdefault(turn.session, i)
    ended = {turn.session: i for i, turn in enumerate(replay.turns)}
    assert began[2] > min(ended[0], ended[1])  # a paused session counts as open
    server = FakeServer(fail=1)
    replay, _ = replayed(Agents(SHAPE, iter([0.0] * 3), 3, seed=1), server, concurrency=1)
    assert replay.abandoned == 1 and len(replay.turns) == 1 + 2 * SHAPE.requests


def trace(tmp_path, *entries) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in entries))
    return str(file)


def line(timestamp, blocks, output=100, extra=0, **more):
    length = MOONCAKE_BLOCK * len(blocks) + extra
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": blocks, **more}


def test_turns_of_a_trace_are_found_by_their_text(tmp_path):
    path = trace(
        tmp_path,
        line(0, [0, 1, 2]),
        line(500, [0, 9]),
        line(60_000, [0, 1, 2, 3], output=5),
        line(61_000, [0, 1, 2, 4]),
        line(200_000, [0, 1, 2, 3, 5]),
    )
    arrivals = read_trace(path)
    link_sessions(arrivals)
    assert [arrival.conversation for arrival in arrivals] == [0, 1, 0, 2, 0]  # the fourth is a fork
    server = FakeServer()
    replayed(Recorded(arrivals), server)
    first, fork, second, third = sorted(s for s in server.seen if len(s[2]) > 1024)
    assert second[0] - first[1] == pytest.approx(0) and fork[0] == pytest.approx(
        61.0
    )  # 153.6 s of answer: later than 60 s
    assert third[0] == pytest.approx(max(second[1], second[0] + 140.0))
    assert second[2][:1536] == first[2] and second[2][1536] >= 5000 and fork[2][:1536] == first[2]


def test_session_ids_and_delays(tmp_path):
    path = trace(
        tmp_path,
        line(1000, [], extra=20, output=5, session_id="a"),
        {"session_id": "a", "delay": 4000, "input_length": 40, "output_length": 2},
        line(1000, [], extra=30, output=5, session_id="b"),
    )
    server = FakeServer()
    replayed(Recorded(read_trace(path)), server, concurrency=1)
    assert [(round(began, 3), round(ended, 3), len(prompt)) for began, ended, prompt in server.seen] == [
        (0.0, 2.0, 20), (6.0, 10.0, 40), (10.0, 13.0, 30),
    ]  # fmt: skip
    assert server.seen[1][2][:25] == server.seen[0][2] + list(range(5000, 5005))


@pytest.mark.parametrize(
    "entry, reason",
    [
        ("{", "line 2: not JSON"),
        ({"session_id": "new", "delay": 3, "input_length": 4, "output_length": 4}, "line 2: timestamp is missing"),
        (line(0, [1], session_id=[1]), "line 2: session_id must be a string or an integer"),
        (line(0, [1], session_id="a", delay=-1), "line 2: delay is -1"),
        (line(0, [-1]), "line 2: hash_ids must be a list"),
    ],
)
def test_a_broken_trace_is_one_line(entry, reason, tmp_path, capsys):
    path = trace(tmp_path, line(0, [1], session_id="a"), entry)
    assert serving.main(["--dataset-name", "agentic", "--dataset-path", path, "--port", "9"]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1 and path in error


@pytest.mark.parametrize(
    "options, name",
    [
        (["--agent-turns", "0"], "--agent-turns"),
        (["--agent-fork-share", "1.5"], "--agent-fork-share"),
        (["--agent-pause", "-1"], "--agent-pause"),
        (["--agent-sessions", "0"], "--agent-sessions"),
        (["--apply-chat-template"], "--apply-chat-template"),
    ],
)
def test_impossible_options_are_named(options, name, capsys):
    assert serving.main(["--dataset-name", "agentic", "--port", "9", *options]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, name",
    [
        ([], ""),
        (["--agent-turns", "0", "--dataset-name", "agentic"], "--agent-turns"),
        (["--extra-request-body", "[1]"], "--extra-request-body"),
        (["--goodput", "ttf:5"], "--goodput ttf:5"),
        (["--header", "a"], "--header a"),
        (["--random-range-ratio", "2"], "--random-range-ratio"),
        (["--dataset-name", "sharegpt", "--dataset-path", "/no/file"], "--dataset-path /no/file"),
        (["--output-file", "/no/folder/file"], "--output-file /no/folder/file"),
    ],
)
def test_a_check_reads_all_options_and_asks_no_server(options, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    usual = ["--port", "9", "--dataset-name", "random", "--num-prompts", "2"]
    assert serving.main([*usual, *options, "--check"]) == (2 if name else 0)
    error = capsys.readouterr().err
    assert name in error and error.count("\n") == bool(name) and list(tmp_path.iterdir()) == []


def test_a_curve_is_for_sessions_only(capsys):
    with pytest.raises(SystemExit):
        serving.parse_arguments(["--dataset-name", "random", "--max-concurrency", "1", "2"])
    assert "agentic" in capsys.readouterr().err


def test_text_depends_on_number_and_salt():
    numbers = random.choices(range(1 << 56), k=2000)
    one = TokenText(VOCABULARY, "1").tokens(numbers)
    assert one == TokenText(VOCABULARY, "1").tokens(numbers) and set(one) <= set(VOCABULARY.plain_ids)
    other = TokenText(VOCABULARY, "2").tokens(numbers)
    assert sum(a == b for a, b in zip(one, other)) < 20
    assert len(set(one)) > 700  # of 1000


def test_the_metric_by_hand():
    def answer(latency, output_len, **more):
        return Answer(100, output_len, True, latency=latency, **more)

    # seconds per token: 0.1, 0.2, ..., 1.0, 1.1: the 90th percentile is the tenth of eleven values
    answers = [answer(i / 10 * 20, 20) for i in range(1, 12)]
    assert agent_report.normalized_interactivity(answers) == pytest.approx(1 / 1.0)
    assert agent_report.normalized_interactivity([*answers, Answer(5, error="x"), answer(9, 0)]) == pytest.approx(1.0)
    assert agent_report.normalized_interactivity([answer(2.0, 8), answer(6.0, 8)]) == pytest.approx(1 / 0.7)
    assert agent_report.normalized_interactivity([]) == 0
    tiers = {"device": 50, "host": 30, "storage": 10}
    kinds = {
        "first": [answer(1.0, 10, ttft=0.5, cached_tokens=10)],
        "returning": [answer(1.0, 10, ttft=0.1, cached_tokens=90, cached_by_tier=tiers)],
    }
    values = agent_report.figures(kinds, 1, 0)
    assert values["cached_tokens_by_tier"] == {"device": 60, "host": 30, "storage": 10}
    assert values["cache_hit_rate"] == 0.5
    assert values["median_first_turn_ttft_ms"] == 500 and values["median_returning_turn_ttft_ms"] == 100


SMALL = (
    "--dataset-name agentic --agent-sessions 3 --agent-turns 3 --agent-system-len 24 --agent-input-len 12 "
    "--agent-output-len 4 --agent-pause 0.01 --agent-subagents 1 --agent-subagent-turns 1 --disable-tqdm "
    "--max-concurrency 1 3"
)


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.drawn(1, group="runs of benchmarks")
def test_a_curve_of_the_embedded_model(tmp_path, capsys):
    out, picture = tmp_path / "curve.jsonl", tmp_path / "curve.png"
    with ServerProcess(tmp_path, "--max-total-tokens", "2048", "--enable-hierarchical-cache") as server:
        options = [*SMALL.split(), "--port", str(server.port), "--output-file", str(out), "--plot", str(picture)]
        assert serving.main(options) == 0
    printed = capsys.readouterr().out
    assert printed.count("E2E normalized interactivity (tok/s):") == 2 and "hit rate" in printed
    points = [json.loads(text) for text in out.read_text().splitlines()]
    assert [point["max_concurrency"] for point in points] == [1, 3]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    for point in points:
        assert (point["sessions"], point["completed"], point["failed"]) == (3, 12, 0)
        assert (point["first_turns"], point["returning_turns"], point["subagent_turns"]) == (3, 6, 3)
        assert 0.4 < point["cache_hit_rate"] < 1 and point["e2e_normalized_interactivity"] > 0
        assert sum(point["cached_tokens_by_tier"].values()) == point["total_cached_tokens"]
    assert points[0]["total_input_tokens"] == points[1]["total_input_tokens"]  # the same sessions


def test_the_default_number_of_sessions():
    args = serving.parse_arguments(["--dataset-name", "agentic", "--num-prompts", "40", "--agent-subagents", "4"])
    assert workload_of(args).total == 40  # 8 + 4 * 3 requests of each of two sessions
