"""Every kind of bad input, sent to a real server while another request runs: a clear error, and the same tokens."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import ServerProcess
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")

GREEDY = {"temperature": 0.0, "max_new_tokens": 300, "ignore_eos": True}
CONTEXT = 512


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    path = make_checkpoint("deepseek_v3", folder / "model", seed=5)
    flags = ["--model-path", str(path), "--dtype", "float32", "--max-total-tokens", "2048", "--enable-metrics"]
    with ServerProcess(folder, *flags, "--served-model-name", "tiny") as server:
        yield server


def sampling(**values: Any) -> dict[str, Any]:
    return {"text": "hello", "sampling_params": {"max_new_tokens": 2, **values}}


def chat(**values: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **values}


BAD: list[tuple[str, str, Any, str]] = [
    ("/generate", "prompt over the context", {"input_ids": [1] * 600}, "512"),
    ("/generate", "max_new_tokens over the context", sampling(max_new_tokens=600), "context"),
    ("/generate", "empty prompt", {"text": ""}, "text: expected a string of length >= 1"),
    ("/generate", "no prompt", {"sampling_params": {}}, "text"),
    ("/generate", "text and ids", {"text": "a", "input_ids": [1]}, "exactly one"),
    ("/generate", "ids out of range", {"input_ids": [1, 320]}, "input_ids"),
    ("/generate", "negative id", {"input_ids": [-1]}, "input_ids"),
    ("/generate", "id of a wrong type", {"input_ids": [1, "2"]}, "input_ids"),
    ("/generate", "huge id", {"input_ids": [2**70]}, "input_ids"),
    ("/generate", "negative temperature", sampling(temperature=-1), "temperature"),
    ("/generate", "temperature of a wrong type", sampling(temperature="hot"), "temperature"),
    ("/generate", "absurd temperature", sampling(temperature=1e300), "temperature"),
    ("/generate", "top_p", sampling(top_p=0), "top_p"),
    ("/generate", "top_k", sampling(top_k=-2), "top_k"),
    ("/generate", "min_p", sampling(min_p=2), "min_p"),
    ("/generate", "repetition penalty", sampling(repetition_penalty=0), "repetition_penalty"),
    ("/generate", "frequency penalty", sampling(frequency_penalty=9), "frequency_penalty"),
    ("/generate", "negative max_new_tokens", sampling(max_new_tokens=-1), "max_new_tokens"),
    ("/generate", "n", sampling(n=0), "n"),
    ("/generate", "thousands of stop strings", sampling(stop=["x"] * 5000), "stop"),
    ("/generate", "empty stop string", sampling(stop=[""]), "stop"),
    ("/generate", "stop of a wrong type", sampling(stop=[1]), "stop"),
    ("/generate", "logit bias outside the vocabulary", sampling(logit_bias={"99999": 1}), "logit_bias"),
    ("/generate", "unknown sampling field", sampling(temprature=1), "temprature"),
    ("/generate", "structured output", sampling(json_schema='{"not": {}}'), "at /not: not enforced"),
    ("/generate", "sampling_params of a wrong type", {"text": "a", "sampling_params": 3}, "sampling_params"),
    ("/generate", "stream of a wrong type", {"text": "a", "stream": "maybe"}, "stream"),
    ("/v1/completions", "adapter", {"model": "gpt-9:french", "prompt": "a"}, "french"),
    ("/v1/completions", "no prompt", {"model": "tiny"}, "prompt"),
    ("/v1/completions", "prompt of a wrong type", {"model": "tiny", "prompt": {"a": 1}}, "prompt"),
    ("/v1/completions", "max_tokens over the context", {"model": "tiny", "prompt": "a", "max_tokens": 1000}, "context"),
    ("/v1/chat/completions", "no messages", {"model": "tiny"}, "messages"),
    ("/v1/chat/completions", "empty messages", chat(messages=[]), "messages"),
    ("/v1/chat/completions", "message without role", chat(messages=[{"content": "x"}]), "role"),
    ("/v1/chat/completions", "messages of a wrong type", chat(messages="hello"), "messages"),
    ("/v1/chat/completions", "temperature", chat(temperature=-0.5), "temperature"),
    ("/v1/chat/completions", "top_p", chat(top_p=-0.1), "top_p"),
    ("/v1/chat/completions", "max_tokens of a wrong type", chat(max_tokens="many"), "max_tokens"),
    ("/v1/chat/completions", "n of a wrong type", chat(n=1.5), "n"),
    ("/v1/chat/completions", "json schema", chat(response_format={"type": "yaml"}), "is unknown"),
]


def test_huge_body_is_refused_early(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        head = ["POST /generate HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 8000000000"]
        sock.sendall("\r\n".join([*head, "", ""]).encode())
        assert b"413" in sock.recv(4096).split(b"\r\n")[0]


def test_other_requests_keep_their_tokens(server: ServerProcess) -> None:
    body = {"text": "The quick brown fox", "sampling_params": GREEDY}
    with server.client() as client:
        alone = client.post("/generate", json=body).json()["output_ids"]
        client.post("/flush_cache")
    answers: list[Any] = []

    def ask() -> None:
        with server.client() as client:
            answers.append(client.post("/generate", json=body).json()["output_ids"])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    with server.client() as client:
        while any(t.is_alive() for t in threads) and time.monotonic() < deadline:
            for path, _, bad, _ in BAD:
                assert client.post(path, json=bad).status_code >= 400
            disconnect_mid_stream(server)
    for thread in threads:
        thread.join(180)
    assert answers == [alone] * 3
    state = server.wait_idle()
    assert state["num_free"] + state["num_evictable"] == state["num_slots"]


def disconnect_mid_stream(server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        for _ in answer.iter_lines():
            break


def test_request_that_never_fits(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "model", seed=5)
    flags = ["--model-path", str(path), "--max-total-tokens", "64"]
    with ServerProcess(tmp_path, *flags) as server, server.client() as client:
        answer = client.post("/generate", json=sampling(max_new_tokens=100))
        assert answer.status_code == 400
        assert "--max-total-tokens" in answer.text or "--mem-fraction-static" in answer.text
        assert client.post("/generate", json=sampling(max_new_tokens=20)).status_code == 200


def test_disconnect_frees_everything(server: ServerProcess) -> None:
    for _ in range(5):
        disconnect_mid_stream(server)
    state = server.wait_free()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.get("/flush_cache").status_code == 200
    assert server.state()["num_free"] == state["num_slots"]
