"""sglang-router in front of this project's servers: policies, APIs, streams, tools, lost and new servers."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.disaggregation.pair import Pair
from tests.e2e.server_process import ServerProcess
from tests.router.router_process import RouterProcess, needs_router
from tests.waiting import until

pytestmark = [needs_router, pytest.mark.usefixtures("forked_processes")]

FLAGS = (
    *("--context-length", "1024", "--chunked-prefill-size", "256", "--max-total-tokens", "1600"),
    *("--max-running-requests", "16", "--cpu-threads", "1", "--host", "127.0.0.1"),
)
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Lima"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        made = [ServerProcess(tmp_path, *FLAGS) for _ in range(2)]  # started at the same time
        yield [stack.enter_context(server) for server in made]


def hit_rate(url: str) -> float:
    """Cached part of the prompts of sessions with new prefixes, which start together and then take turns."""
    rng = random.Random(random.getrandbits(63))
    heads = [" ".join(str(rng.randrange(1000)) for _ in range(100)) for _ in range(9)]
    counts = [0, 0]

    def turn(client: httpx.Client, head: str, number: int) -> None:
        body = {"text": f"{head} {number}", "sampling_params": GREEDY}
        meta = client.post("/generate", json=body).raise_for_status().json()["meta_info"]
        counts[0] += meta["cached_tokens"]
        counts[1] += meta["prompt_tokens"]

    with httpx.Client(base_url=url, timeout=180) as client:
        threads = [threading.Thread(target=turn, args=(client, head, 0)) for head in heads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(1, 6):
            for head in heads:
                turn(client, head, number)
    return counts[0] / counts[1]


def test_cache_aware_has_twice_the_hits_of_round_robin(servers: list[ServerProcess], tmp_path: Path) -> None:
    """A cache holds the prefixes of half the sessions: with round robin each server gets all of them in turn. Every
    policy answers."""
    urls = [server.url for server in servers]
    rates = {}
    for policy in ("cache_aware", "round_robin", "power_of_two"):
        with RouterProcess(tmp_path, urls, "--policy", policy) as router:
            rates[policy] = hit_rate(router.url)
    assert rates["cache_aware"] >= 2 * rates["round_robin"], rates
    assert rates["cache_aware"] > 0.2, rates


def test_apis_through_the_router(servers: list[ServerProcess], tmp_path: Path) -> None:
    """The answers are those of a server: OpenAI and native, streamed and complete, with tools."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    native = {"text": "The capital of Japan is", "sampling_params": GREEDY}
    with RouterProcess(tmp_path, [server.url for server in servers]) as router, router.client() as client:
        direct = httpx.post(servers[0].url + "/generate", json=native, timeout=180).json()
        assert client.post("/generate", json=native).json()["output_ids"] == direct["output_ids"]
        with client.stream("POST", "/generate", json=native | {"stream": True}) as stream:
            events = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]" and json.loads(events[-2])["output_ids"] == direct["output_ids"]
        openai = OpenAI(base_url=router.url + "/v1", api_key="none")
        answer = openai.chat.completions.create(model="demo", messages=question, temperature=0)
        assert "Paris" in (answer.choices[0].message.content or "")
        chunks = openai.chat.completions.create(model="demo", messages=question, temperature=0, stream=True)
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        called = openai.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            tools=[TOOL],  # type: ignore[list-item]
            tool_choice="required",
            temperature=0,
        )
        (call,) = called.choices[0].message.tool_calls or []
        assert call.function.name == "get_weather" and "city" in json.loads(call.function.arguments)  # type: ignore[union-attr]
        completion = openai.completions.create(model="demo", prompt="The capital of Japan is", temperature=0)
        assert completion.choices[0].text
        assert [model.id for model in openai.models.list()] == ["demo"]
        assert client.get("/get_model_info").json()["served_model_name"] == "demo"
        loads = client.get("/get_loads").json()["workers"]
        assert {load["worker"] for load in loads} == {server.url for server in servers}
        assert all(load["load"] == 0 for load in loads), loads
        assert client.post("/flush_cache").status_code == 200
        bad = client.post("/generate", json={"text": "a", "sampling_params": {"temperature": -1}})
        assert bad.status_code == 400 and "temperature" in bad.text
        page = httpx.get(f"http://127.0.0.1:{router.prometheus}/metrics").text
        assert "smg_worker_pool_size" in page or "smg_" in page


def test_a_server_is_killed_and_another_one_added_under_load(tmp_path: Path) -> None:
    """Requests without output on the lost server are sent to another server; its streams end."""
    stop, failed, done = threading.Event(), [], []
    with (
        ServerProcess(tmp_path, *FLAGS) as first,
        ServerProcess(tmp_path, *FLAGS) as second,
        RouterProcess(tmp_path, [first.url, second.url], "--policy", "round_robin") as router,
    ):

        def load() -> None:
            body = {"text": "The capital of Japan is", "sampling_params": GREEDY}
            with router.client() as client:
                while not stop.is_set():
                    answer = client.post("/generate", json=body)
                    (done if answer.status_code == 200 else failed).append(answer.status_code)

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: len(done) > 20)
            for process in [*first.children(), first.process]:
                process.kill()
            router.wait_healthy(1)
            with ServerProcess(tmp_path, *FLAGS) as third:
                with router.client() as client:
                    assert client.post("/workers", json={"url": third.url}).status_code in (200, 202)
                router.wait_healthy(2)
                before = len(done)
                until(lambda: len(done) > before + 20)
                assert "POST /generate" in third.log
                stop.set()
                for thread in threads:
                    thread.join()
        finally:
            stop.set()
    assert not failed, failed


@pytest.mark.parametrize("pairs", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_prefill_and_decode_servers(tmp_path: Path, pairs: int) -> None:
    """The router's PD mode: native and OpenAI API, batches, streams, log-probabilities, tools."""
    native = {"text": "The capital of Japan is", "sampling_params": GREEDY}
    long = {"text": " ".join(map(str, range(60))), "sampling_params": GREEDY}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with ExitStack() as stack:
        made = [Pair(tmp_path) for _ in range(pairs)]
        servers = [stack.enter_context(pair) for pair in made]
        expected = httpx.post(servers[0].decode.url + "/generate", json=long, timeout=180).json()["output_ids"]
        flags = ["--pd-disaggregation"]
        for pair in servers:
            flags += ["--prefill", pair.prefill.url, str(pair.port), "--decode", pair.decode.url]
        router = stack.enter_context(RouterProcess(tmp_path, [], *flags, "--policy", "round_robin"))
        router.wait_healthy(2 * pairs)
        with router.client() as client:
            for _ in range(2 * pairs):
                answer = client.post("/generate", json=long).json()
                assert answer["output_ids"] == expected
            with client.stream("POST", "/generate", json=native | {"stream": True}) as stream:
                lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "data: [DONE]"
            merged = client.post("/generate", json=long | {"return_logprob": True, "logprob_start_len": 0}).json()
            assert merged["output_ids"] == expected
        openai = OpenAI(base_url=router.url + "/v1", api_key="none")
        answer = openai.chat.completions.create(model="demo", messages=question, temperature=0)
        assert "Paris" in (answer.choices[0].message.content or "")
        called = openai.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            tools=[TOOL], tool_choice="required", temperature=0,  # type: ignore[list-item]
        )  # fmt: skip
        assert (called.choices[0].message.tool_calls or [])[0].function.name == "get_weather"  # type: ignore[union-attr]
        assert all("its prompt is computed here" not in pair.decode.log for pair in servers)


def test_a_killed_router_frees_its_requests_and_serves_again(tmp_path: Path) -> None:
    """Streams end at a prefill and a decode server with the router's connections."""
    sizes = ("--json-model-override-args", json.dumps({"max_position_embeddings": 16384}), "--enable-metrics")
    sizes += ("--context-length", "16384", "--max-total-tokens", "65536")
    long = {"model": "demo", "prompt": "The capital of Japan is", "max_tokens": 15_000, "ignore_eos": True}
    short = {"text": " ".join(map(str, range(60))), "sampling_params": GREEDY}
    with ExitStack() as stack:
        pair = stack.enter_context(Pair(tmp_path, *sizes))
        flags = ("--pd-disaggregation", "--prefill", pair.prefill.url, str(pair.port), "--decode", pair.decode.url)
        with RouterProcess(tmp_path, [], *flags) as router, router.client() as client, ExitStack() as opened:
            expected = client.post("/generate", json=short).raise_for_status().json()["output_ids"]
            streams = [client.stream("POST", "/v1/completions", json=long | {"stream": True}) for _ in range(3)]
            lines = [opened.enter_context(stream).iter_lines() for stream in streams]
            assert all(next(each).startswith("data: ") for each in lines)
            assert pair.decode.state()["num_running"] == 3
            router.process.kill()
            for server in (pair.prefill, pair.decode):
                server.wait_free()
                assert "repaired" not in server.log
            page = httpx.get(pair.decode.url + "/metrics").text
            assert re.findall(r"num_aborted_requests_total\{.*\} (\S+)", page) == ["3.0"]
        with RouterProcess(tmp_path, [], *flags) as router, router.client() as client:
            assert client.post("/generate", json=short).raise_for_status().json()["output_ids"] == expected
