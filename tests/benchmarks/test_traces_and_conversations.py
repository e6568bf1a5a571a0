"""The datasets ``mooncake`` and ``generated-shared-prefix`` with turns of the serving benchmark."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serving
from benchmarks.clients import CallOptions
from moe_engine.tuning.answer import Answer
from moe_engine.tuning.datasets import BenchRequest, Vocabulary
from tests.benchmarks import virtual_time

WORDS = Vocabulary(
    encode=lambda text: [int(word) for word in text.split()], decode=str, plain_ids=list(range(100, 900))
)


def requests_of(*argv: str) -> list[BenchRequest]:
    return serving._requests(serving.parse_arguments(list(argv)), WORDS)


@pytest.fixture
def trace(tmp_path: Path) -> tuple[str, list[dict[str, Any]]]:
    """A trace with random times, in random order, and its lines by time."""
    rng = random.Random(random.getrandbits(32))
    lines = [
        {
            "timestamp": 27_000 + rng.randrange(100_000),
            "input_length": rng.randint(1025, 1530),
            "output_length": rng.randint(1, 40),
            "hash_ids": [7, rng.choice([8, 9]), 100 + i],
        }
        for i in range(12)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return str(file), sorted(lines, key=lambda line: line["timestamp"])


def test_requests_of_a_trace(trace: tuple[str, list[dict[str, Any]]]) -> None:
    path, lines = trace
    found = requests_of("--dataset-name", "mooncake", "--dataset-path", path, "--mooncake-slowdown-factor", "0.5")
    assert [request.prompt_len for request in found] == [line["input_length"] for line in lines]
    assert [len(request.prompt) for request in found] == [line["input_length"] for line in lines]
    assert [request.output_len for request in found] == [line["output_length"] for line in lines]
    first = lines[0]["timestamp"]
    assert [request.at for request in found] == pytest.approx([(line["timestamp"] - first) / 2000 for line in lines])
    for i, one in enumerate(found):
        for j, other in enumerate(found):
            alike = lines[i]["hash_ids"][1] == lines[j]["hash_ids"][1]
            assert one.prompt[:512] == other.prompt[:512]
            assert (one.prompt[512:1024] == other.prompt[512:1024]) is alike
            assert i == j or one.prompt[1024:] != other.prompt[1024:]


def test_rounds_repeat_the_prompt_behind_the_text_before(trace: tuple[str, list[dict[str, Any]]]) -> None:
    path, lines = trace
    argv = ("--dataset-name", "mooncake", "--dataset-path", path, "--request-rate", "3", "--num-prompts", "12")
    once, thrice = requests_of(*argv), requests_of(*argv, "--mooncake-num-rounds", "3")
    assert len(thrice) == 3 * len(once) == 36 and {request.at for request in thrice} == {None}, "at the given rate"
    for i, request in enumerate(once):
        first, second, third = (list(turn.prompt) for turn in thrice[3 * i : 3 * i + 3])
        prompt, answer = list(request.prompt), lines[i]["output_length"]
        assert first == prompt and second[: len(first)] == first and third[: len(second)] == second
        assert second[len(first) + answer :] == prompt == third[len(second) + answer :]
        assert third[len(second) : len(second) + answer] != second[len(first) : len(first) + answer] or answer < 4


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--dataset-name", "mooncake"], "--dataset-path FILE.jsonl"),
        (["--dataset-name", "random", "--use-trace-timestamps"], "need --dataset-name mooncake"),
        (["--dataset-name", "mooncake", "--dataset-path", "x", "--use-trace-timestamps", "--request-rate", "3"],
         "leave out --request-rate"),
        (["--dataset-name", "mooncake", "--dataset-path", "x", "--mooncake-slowdown-factor", "-1"], "at least 0"),
        (["--dataset-name", "mooncake", "--dataset-path", "x", "--mooncake-num-rounds", "0"], "at least 1"),
        (["--dataset-name", "random", "--gsp-num-turns", "2"], "needs --dataset-name generated-shared-prefix"),
    ],
)  # fmt: skip
def test_options_that_do_nothing_are_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serving.parse_arguments(argv)
    assert words in capsys.readouterr().err


class Server:
    """Answers requests after a second; the answer's tokens count up. Every `fails`-th request fails."""

    def __init__(self, fails: int = 0) -> None:
        self.seen: list[tuple[float, float, list[int]]] = []
        """Begin, end and prompt of each request."""
        self._fails = fails

    async def __call__(self, request: BenchRequest, options: CallOptions) -> Answer:
        clock = asyncio.get_running_loop()
        began, number = clock.time(), len(self.seen)
        self.seen.append((began, began, list(request.prompt)))
        await asyncio.sleep(1.0)
        self.seen[number] = (began, clock.time(), list(request.prompt))
        if self._fails and number % self._fails == self._fails - 1:
            return Answer(request.prompt_len, error="no")
        text = " ".join(str(1000 * number + i) for i in range(request.output_len))
        return Answer(request.prompt_len, request.output_len, True, text=text)


def load(monkeypatch: pytest.MonkeyPatch, server: Server, requests: list[BenchRequest], **more: Any) -> list[Answer]:
    async def run() -> list[Answer]:
        monkeypatch.setattr(serving.time, "perf_counter", asyncio.get_running_loop().time)
        options = CallOptions("http://x")
        return (await serving.run_load(requests, options, backend="x", show_progress=False, **more))[0]

    monkeypatch.setitem(serving.BACKENDS, "x", server)
    return virtual_time.run(run())


def test_requests_are_sent_at_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    server, rng = Server(), random.Random(random.getrandbits(32))
    times = sorted(rng.uniform(0, 30) for _ in range(20))
    load(monkeypatch, server, [BenchRequest([1], 1, 2, at=at) for at in times], request_rate=1.0)
    assert [began for began, _, _ in server.seen] == pytest.approx(times, abs=0.01)


def test_a_turn_has_the_conversation_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--gsp-num-groups", "2", "--gsp-prompts-per-group", "3", "--gsp-system-prompt-len", "20"]
    argv += ["--gsp-question-len", "4", "--gsp-output-len", "3", "--gsp-num-turns", "4"]
    requests = requests_of("--dataset-name", "generated-shared-prefix", *argv)
    server = Server()
    answers = load(monkeypatch, server, requests, max_concurrency=2, encode=WORDS.encode)
    assert len(answers) == 24 and all(answer.success for answer in answers)
    assert [answer.prompt_len for answer in answers] == [24, 31, 38, 45] * 6, "by conversation"
    for i, request in enumerate(requests):
        turns = sorted((entry for entry in server.seen if entry[2][:24] == request.prompt), key=lambda entry: entry[0])
        assert len(turns) == 4
        for turn, (before, after) in enumerate(pairwise(turns)):
            assert after[0] >= before[1], "sent after the answer"
            said = WORDS.encode(answers[4 * i + turn].text)
            assert after[2] == [*before[2], *said, *request.questions[turn]]
    most = max(sum(begin <= t < end for begin, end, _ in server.seen) for t, _, _ in server.seen)
    assert most == 2, "conversations at once"


def test_a_failed_turn_ends_its_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    request = BenchRequest([1, 2], 2, 2, questions=((3,), (4,), (5,)))
    answers = load(monkeypatch, Server(fails=2), [request], encode=WORDS.encode)
    assert [answer.success for answer in answers] == [True, False]
