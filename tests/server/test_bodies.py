"""The place of work on a request's body: the event loop, a thread, or a process for large bodies."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from starlette.routing import Route

from moe_engine.frontend.prepare import THREAD_CHARS
from moe_engine.server import (
    anthropic_api,
    bodies,
    embeddings_api,
    http_io,
    native_api,
    ollama_api,
    parse_api,
    scoring_api,
    text_process,
    text_processes,
)
from moe_engine.server.bodies import PROCESS_BYTES
from moe_engine.server.endpoints import REFUSED_PATHS
from moe_engine.server.openai import chat, completions
from moe_engine.server.text_frames import HEADER, Kind, frame
from moe_engine.tokenizer.chat_template import ChatTemplate
from moe_engine.tokenizer.tokenizer import Tokenizer
from tests.server.fake_engine import POOLING, FakeClient
from tests.server.harness import in_process, make_app, post, real_server
from tests.waiting import until

ONE_SCORE = dataclasses.replace(POOLING, head="linear", width=1, labels=("LABEL_0",))
TOOL = {"type": "function", "function": {"name": "f"}}
SETTINGS = {"reasoning_parser": "deepseek-r1", "tool_call_parser": "deepseekv31"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "Hello", "return_logprob": True, "sampling_params": {"stop": ["you"]}}),
    ("/generate", {"text": ["Hello", "a b"], "rid": "r", "sampling_params": [{"n": 2}, {"max_new_tokens": 2}]}),
    ("/generate", {"input_ids": [[5, 6], [7]], "stream": True}),
    ("/v1/completions", {"prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 3}),
    ("/v1/completions", {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "logprobs": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 2}),
    ("/invocations", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/tokenize", {"prompt": "Hello world"}),
    ("/tokenize", {"prompt": ["Hello world", "", "a"], "add_special_tokens": False}),
    ("/v1/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/v1/detokenize", {"tokens": [[5, 6], [7]]}),
    ("/separate_reasoning", {"text": "why</think>because"}),
    ("/parse_function_call", {"text": "Hello", "tools": [TOOL]}),
    ("/v1/score", {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 5}),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 5, "store": False}),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/api/chat", {"messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 5}}),
    ("/api/generate", {"prompt": "hi", "raw": True, "options": {"num_predict": 5}, "stream": False}),
]
VECTORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": ["Hello", "a b"], "encoding_format": "base64"}),
    ("/encode", {"text": "Hello"}),
    ("/classify", {"input_ids": [[5, 6], [7]]}),
    ("/v1/classify", {"input": "Hello"}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/v2/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/rerank", {"query": "a", "documents": ["b", "c"]}),
]
"""Endpoints of embedding models, and of classification models."""
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "x", "sampling_params": {"temperature": -1}}),
    ("/generate", {"text": "x", "lora_path": "y"}),
    ("/v1/completions", {"prompt": "a", "temperature": float("nan")}),
    ("/v1/chat/completions", {"messages": [{"role": "stranger", "content": "hi"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5}),
    ("/v1/responses", {"input": [{"type": "computer_call"}]}),
    ("/api/chat", {"messages": [{"role": "user", "content": "hi"}], "options": {"top_p": 2}}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [10**9]}),
    ("/separate_reasoning", {"text": 5}),
    ("/parse_function_call", {"text": "Hello", "tools": [5]}),
]
CONTROL = {
    "/abort_request", "/flush_cache", "/reset_prefix_cache", "/start_expert_distribution_record",
    "/stop_expert_distribution_record", "/dump_expert_distribution_record",
    "/start_profile", "/stop_profile", "/update_weights_from_disk",
    "/load_lora_adapter", "/unload_lora_adapter", "/pause_generation", "/continue_generation",
    "/update_weights_from_tensor", "/update_weight_version", "/get_weights_by_name", "/post_process_weights",
    "/set_internal_state", "/release_memory_occupation", "/resume_memory_occupation",
    "/open_session", "/close_session", "/configure_logging", "/freeze_gc", "/clear_hicache_storage_backend",
    "/hicache/storage-backend/clear", "/api/show",
    "/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed",
    "/v1/responses/{response_id}/cancel",
}  # fmt: skip


def client_of(path: str) -> FakeClient:
    """A client of a model that supports the endpoint."""
    if path not in dict(VECTORS):
        return FakeClient()
    client = FakeClient(pooling=POOLING if path == "/v1/embeddings" else ONE_SCORE)
    client.vector = lambda request: array("f", [float(len(request.prompt_ids))])
    return client


def padded(body: dict[str, Any], size: int) -> bytes:
    """The same request, larger than `size` bytes: unknown fields are ignored."""
    return json.dumps({**body, "unknown": "x" * size}).encode()


def shown(response: httpx.Response) -> tuple[int, str]:
    """Status and body without the fields that differ between requests."""
    text = response.text
    text = __import__("re").sub(r',"decode_throughput":[-+.e\d]+', "", text)  # absent if all tokens came at once
    times = ("request_received_ts", "request_finished_ts", "forward_entry_time", "prefill_finished_time")
    times += ("total_duration", "prompt_eval_duration", "eval_duration")
    for name in ("e2e_latency", "first_token_latency", *times, "created", "created_at", "id"):
        value = '[-+.e\\d]+|"[^"]*"'
        text = __import__("re").sub(f'"{name}":({value})', f'"{name}":0', text)
    return response.status_code, text


def test_every_endpoint_with_a_body_is_covered():
    routes = [route for route in make_app(FakeClient()).routes if isinstance(route, Route) or hasattr(route, "methods")]
    paths = {route.path for route in routes if "POST" in (route.methods or ())}
    assert paths - set(REFUSED_PATHS) - CONTROL == {path for path, _ in [*CASES, *VECTORS]}


@pytest.fixture
def places(monkeypatch):
    """The threads in which bodies are decoded, rendered and tokenized."""
    seen: set[int] = set()

    def watched(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.add(threading.get_ident())
            return function(*args, **kwargs)

        return run

    for module in (
        anthropic_api, embeddings_api, native_api, ollama_api, chat, completions, parse_api, scoring_api
    ):  # fmt: skip
        for name in ("decode_body", "decode_body_and_rest"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, watched(getattr(http_io, name)))
    monkeypatch.setattr(ChatTemplate, "render", watched(ChatTemplate.render))
    for name in ("encode_batch", "encode_parts", "encode_pairs", "decode"):
        monkeypatch.setattr(Tokenizer, name, watched(getattr(Tokenizer, name)))
    return seen


@pytest.mark.parametrize(("path", "body"), [*CASES, *VECTORS])
@pytest.mark.parametrize("size", [0, THREAD_CHARS])
def test_body_size_selects_loop_or_thread(places, path, body, size):
    """For the process of larger bodies: `test_large_bodies_get_the_same_responses_as_small_ones`."""
    client = client_of(path)
    client.script = lambda _: [5, 6, 7, client.info.eos_token_ids[0]]  # without tokenizing
    response = post(client, path, padded(body, size), **SETTINGS)
    assert response.status_code == 200
    if size == 0:
        assert places == {threading.get_ident()}
    else:
        assert places and threading.get_ident() not in places


@pytest.mark.parametrize("size", [THREAD_CHARS, PROCESS_BYTES])
def test_tokenizer_that_no_process_can_load_uses_threads(places, monkeypatch, size):
    client = FakeClient()
    monkeypatch.setattr(client.tokenizer, "source", None)
    assert post(client, "/tokenize", padded({"prompt": "Hello"}, size)).json()["count"] == 2
    assert places and threading.get_ident() not in places


@pytest.mark.parametrize("settings", [SETTINGS, {"skip_tokenizer_init": True}], ids=["text", "ids"])
async def test_large_bodies_get_the_same_responses_as_small_ones(places, settings):
    """One process serves all requests in turn: failed work leaves no state."""
    client = FakeClient()
    tokens = client.script(None)
    client.script = lambda _: tokens  # without tokenizing
    async with in_process(client, **settings) as http:
        for path, body in [*CASES, *WRONG]:
            small = await http.post(path, content=padded(body, 0))
            places.clear()
            large = await http.post(path, content=padded(body, PROCESS_BYTES))
            assert shown(small) == shown(large), path
            assert not places, path  # another process
        assert len(children()) == 1


@pytest.mark.parametrize("cases", [VECTORS[:1], VECTORS[1:]], ids=["vectors", "scores"])
async def test_large_bodies_get_the_same_vectors_as_small_ones(cases):
    async with in_process(client_of(cases[0][0])) as http:
        for path, body in cases:
            small, large = [await http.post(path, content=padded(body, size)) for size in (0, PROCESS_BYTES)]
            assert small.status_code == 200 and shown(small) == shown(large), path
        assert len(children()) == 1


async def test_long_texts():
    """Tokens, counts and text arrive in parts, in order."""
    client = FakeClient()
    text = "Hello world, how are you today? 12345\n" * 40_000
    ids = client.tokenizer.encode(text)
    async with in_process(client) as http:
        got = (await http.post("/tokenize", json={"prompt": [text, "a"]})).json()
        assert (got["tokens"][0] == ids, got["tokens"][1]) == (True, client.tokenizer.encode("a"))
        assert got["count"] == [len(ids), 2]
        assert (await http.post("/detokenize", json={"tokens": ids})).json() == {"text": text, "prompt": text}
        refused = await http.post("/generate", json={"text": text})
        assert "is longer than the model's context length (256 tokens)" in refused.json()["error"]["message"]


def test_large_batches_reach_the_engine_whole():
    client = FakeClient()
    prompts = [[5 + i % 90, 6, 7] * 80 for i in range(800)]
    out = post(client, "/generate", {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}}).json()
    assert len(json.dumps(prompts)) > PROCESS_BYTES
    assert [o["meta_info"]["prompt_tokens"] for o in out] == [240] * 800
    assert [r.prompt_ids for r in client.requests] == prompts


def children() -> list[psutil.Process]:
    """Live processes that decode bodies, without those of other tests of this process."""
    return [p for p in psutil.Process().children() if _decodes_bodies(p)]


def _decodes_bodies(process: psutil.Process) -> bool:
    try:
        return "moe_engine.server.text_process" in process.cmdline()  # empty if it is a zombie
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def has_memory(size: int) -> bool:
    return any(p.memory_info().rss > size for p in children())


LONG = json.dumps({"prompt": "a b " * 2**22}).encode()


def test_client_disconnect_cancels_the_work():
    with real_server(FakeClient()) as address:
        with httpx.stream("POST", address + "/tokenize", content=LONG, timeout=60) as response:
            parts = response.iter_raw()  # dropping the iterator would close the connection
            first = next(parts)
            assert (response.status_code, first[:11]) == (200, b'{"tokens":[')
            assert len(children()) == 1
        until(lambda: not children())
        assert (
            httpx.post(address + "/tokenize", content=padded({"prompt": "Hello"}, PROCESS_BYTES)).json()["count"] == 2
        )
    until(lambda: not children())  # no process remains


def test_a_process_ends_if_the_server_ends_during_its_start(monkeypatch):
    start, started = text_processes.TextProcess.start, []

    async def noted(spec):
        started.append(await start(spec))
        return started[-1]

    monkeypatch.setattr(text_processes.TextProcess, "start", noted)
    with real_server(FakeClient()) as address:
        connection = half_sent(address, PROCESS_BYTES + 2**18)
        connection.sendall(b" " * (PROCESS_BYTES + 2**18))
        until(lambda: bool(started))
    until(lambda: all(process._popen.poll() is not None for process in started))
    connection.close()


def test_a_process_that_dies_is_named_and_replaced():
    answers: list[httpx.Response] = []
    with real_server(FakeClient()) as address:
        body = json.dumps({"tokens": [5] * 8_000_000}).encode()
        ask = threading.Thread(
            target=lambda: answers.append(httpx.post(address + "/detokenize", content=body, timeout=60))
        )
        ask.start()
        until(lambda: has_memory(100 * 2**20))  # the process has the body
        os.kill(children()[0].pid, signal.SIGKILL)
        ask.join()
        assert answers[0].status_code == 413
        assert "was killed by SIGKILL; send smaller requests" in answers[0].json()["error"]["message"]
        assert (
            httpx.post(address + "/tokenize", content=padded({"prompt": "Hello"}, PROCESS_BYTES)).json()["count"] == 2
        )


@pytest.mark.parametrize("idle", [False, True], ids=["with a body", "idle"])
def test_a_process_stopped_by_a_signal_is_named_and_replaced(monkeypatch, idle):
    monkeypatch.setattr(text_processes, "HELD_SECONDS", 0.3)
    text = padded({"prompt": "Hello"}, PROCESS_BYTES)
    answers: list[httpx.Response] = []
    with real_server(FakeClient()) as address:
        assert httpx.post(address + "/tokenize", content=text).json()["count"] == 2
        (process,) = children()
        if idle:
            process.suspend()
        else:
            body = json.dumps({"tokens": [5] * 8_000_000}).encode()
            ask = threading.Thread(
                target=lambda: answers.append(httpx.post(address + "/detokenize", content=body, timeout=60))
            )
            ask.start()
            until(lambda: has_memory(100 * 2**20))
            process.suspend()
            ask.join()
            assert answers[0].status_code == 503
            message = answers[0].json()["error"]["message"]
            assert "was killed by SIGKILL: it had been stopped by a signal for" in message
        assert httpx.post(address + "/tokenize", content=text, timeout=60).json()["count"] == 2
        assert process not in children()


@pytest.mark.parametrize("num_killed", [1, 2])
def test_a_process_that_is_killed_at_its_start_is_replaced_once(monkeypatch, caplog, num_killed):
    start, killed_ones = text_processes.TextProcess.start, []

    async def killed(spec):
        process = await start(spec)
        if len(killed_ones) < num_killed:
            killed_ones.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
        return process

    text = padded({"prompt": "Hello"}, PROCESS_BYTES)
    with real_server(FakeClient()) as address:
        monkeypatch.setattr(text_processes.TextProcess, "start", killed)
        answer = httpx.post(address + "/tokenize", content=text, timeout=60)
        if num_killed == 2:
            assert answer.status_code == 503
            message = answer.json()["error"]["message"]
            assert "was killed by SIGKILL before it was ready, and so did a second one; try again" in message
            answer = httpx.post(address + "/tokenize", content=text, timeout=60)
        assert answer.json()["count"] == 2
    assert all(f"(pid {pid}) was killed by SIGKILL before it was ready" in caplog.text for pid in killed_ones)


class Busy:
    """Loading it takes longer than a test."""

    def __reduce__(self):
        return time.sleep, (3600,)


def test_a_busy_process_ends_with_its_server():
    """It ended with its body only, which may take minutes."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-m", "moe_engine.server.text_process"], stdin=theirs.fileno())
    try:
        ours.sendall(frame(Kind.SPEC, pickle.dumps(Busy())))
        ours.close()
        assert process.wait(180) == 1
    finally:
        process.kill()


def test_out_of_memory_is_an_error_response():
    ours, theirs = socket.socketpair()

    def fails(body: dict[str, Any]) -> Any:
        raise MemoryError

    ours.sendall(frame(Kind.JOB, b"x") + frame(Kind.BODY, b'{"a"') + frame(Kind.BODY, b": 1}") + frame(Kind.BODY_END))
    assert text_process.Server(theirs).work_on_next({"x": fails})
    stream = ours.makefile("rb")
    frames = [(kind, stream.read(size)) for kind, size in (HEADER.unpack(stream.read(HEADER.size)) for _ in range(2))]
    assert frames[0] == (Kind.READY, b"") and frames[1][0] == Kind.PROBLEM
    problem = pickle.loads(frames[1][1])
    assert (problem.status, "4 GB of memory" in problem.message) == (413, True)


def half_sent(address: str, size: int) -> socket.socket:
    """A connection whose client has sent `size` bytes of a larger body and pauses."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (2 * size))
    connection.sendall(b" " * size)
    return connection


def test_queue_of_large_bodies_is_bounded(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_WAITING", 3)
    with real_server(FakeClient()) as address:
        waiting = [half_sent(address, PROCESS_BYTES + 2**18) for _ in range(3)]
        answers = []

        def refused() -> bool:
            with suppress(httpx.TimeoutException):  # it came before one of the three
                body = padded({"prompt": "x"}, PROCESS_BYTES)
                answers.append(httpx.post(address + "/tokenize", content=body, timeout=2))
            return bool(answers) and answers[-1].status_code == 503

        until(refused)
        message = answers[-1].json()["error"]["message"]
        assert re.match(r"3 requests with large bodies \([12] MiB\) are already queued", message), message
        assert httpx.post(address + "/tokenize", json={"prompt": "Hello"}).json()["count"] == 2
        assert httpx.post(address + "/tokenize", json={"prompt": "Hello" * 2000}).status_code == 200
        until(lambda: len(children()) <= 2)  # one that was killed ends when it gets a core
        for connection in waiting:
            connection.close()
        until(lambda: httpx.post(address + "/tokenize", content=padded({"prompt": "x"}, PROCESS_BYTES)).is_success)


def test_clients_that_send_slowly_or_leave_hold_up_no_other_body(monkeypatch):
    """Two of them had both processes for up to 300 s."""
    started, start = [], text_processes.TextProcess.start

    async def noted(spec):
        started.append(await start(spec))
        return started[-1]

    monkeypatch.setattr(text_processes.TextProcess, "start", noted)
    size = PROCESS_BYTES + 2**18
    with real_server(FakeClient()) as address:
        slow = [half_sent(address, size) for _ in range(2 * text_processes.MAX_PROCESSES)]
        for connection in slow[text_processes.MAX_PROCESSES :]:
            connection.close()
        body = padded({"prompt": "Hello"}, PROCESS_BYTES)
        assert httpx.post(address + "/tokenize", content=body, timeout=60).json()["count"] == 2
        assert len(started) == 1
        slow[0].sendall(b" " * size)
        assert slow[0].recv(4096).startswith(b"HTTP/1.1 400 ") and len(started) == 1
        slow[1].close()


def test_the_bytes_of_waiting_bodies_are_bounded(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_WAITING_BYTES", 3 * 2**20)
    monkeypatch.setattr(http_io, "BODY_PAUSE_SECONDS", 600.0)
    body = padded({"prompt": "Hello"}, PROCESS_BYTES + 2**21)
    with real_server(FakeClient()) as address:

        def answer(status: int) -> httpx.Response | None:
            with suppress(httpx.TimeoutException):  # it came before the other one, and waits for a process
                found = httpx.post(address + "/tokenize", content=body, timeout=2 if status == 503 else 60)
                return found if found.status_code == status else None
            return None

        def refusal(connection: socket.socket) -> str | None:
            """Of the body whose part came last: the server may still read the half-sent one."""
            if (found := answer(503)) is not None:
                return found.text
            connection.setblocking(False)
            with suppress(BlockingIOError):
                return connection.recv(65536).decode()
            return None

        with half_sent(address, PROCESS_BYTES + 2**21) as connection:
            message = until(lambda: refusal(connection))
            assert re.search(r"[23] requests with large bodies \(3 MiB\) are already queued", message), message
        until(lambda: answer(200))


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("BODY_PAUSE_SECONDS", 100, "no data of the request body for 0.2 s"),
        ("BODY_PAUSE_SECONDS", PROCESS_BYTES + 2**18, "no data of the request body for 0.2 s"),
        ("SLOW_BODY_SECONDS", PROCESS_BYTES + 2**18, "the request body did not arrive within 0.2 s"),
    ],
)
def test_stalled_body_is_refused(monkeypatch, name, size, words):
    monkeypatch.setattr(http_io, name, 0.2)
    with real_server(FakeClient()) as address, half_sent(address, size) as connection:
        answer = b""
        while data := connection.recv(65536):  # until the server closes
            answer += data
    assert answer.startswith(b"HTTP/1.1 408") and words.encode() in answer


def test_control_bodies_are_short():
    body = padded({"rid": "a"}, 2**16)
    assert post(FakeClient(), "/abort_request", body).status_code == 413


async def test_aborted_response_does_not_look_complete():
    """The status was already sent, so a client detects the failure only by the connection."""

    async def parts():
        yield b"["
        raise ValueError("broken")

    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        await asyncio.Event().wait()

    with pytest.raises(ValueError, match="broken"):
        await http_io.PartsResponse(parts())({"type": "http"}, receive, send)
    assert [message.get("more_body") for message in sent] == [None, True]
