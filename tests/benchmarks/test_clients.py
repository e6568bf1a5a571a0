"""The clients against canned servers: their requests, and their times and counts of a stream."""

import argparse
import asyncio
import base64
import io
import json

import httpx
import pytest
from PIL import Image

from benchmarks import serving
from benchmarks.clients import BACKENDS, CallOptions
from benchmarks.image_requests import image_requests
from benchmarks.load_options import headers_of, sampling_of, wait_until_ready, with_adapters
from moe_engine.tuning.datasets import BenchRequest, Vocabulary
from tests.benchmarks.canned_server import CannedServer


def sse(*chunks: dict) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def native(count: int, text: str) -> dict:
    return {"text": text, "meta_info": {"completion_tokens": count, "prompt_tokens": 3, "cached_tokens": 2}}


NATIVE = sse(native(1, "a"), native(3, "a b c"), native(4, "a b c d"))
USAGE = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
COMPLETIONS = sse(
    {"choices": [{"text": "a"}], "usage": USAGE | {"completion_tokens": 1}},
    {"choices": [{"text": " b c"}], "usage": USAGE | {"completion_tokens": 3}},
    {"choices": [], "usage": USAGE | {"completion_tokens": 4}},
)
CHAT = sse(
    {"choices": [{"delta": {"role": "assistant"}}]},
    {"choices": [{"delta": {"reasoning_content": "a"}}], "usage": USAGE | {"completion_tokens": 2}},
    {"choices": [{"delta": {"content": " b"}}], "usage": USAGE | {"completion_tokens": 4}},
)


def ask(backend: str, body: bytes, status: int = 200, prompt: str | list[int] = "x", request=None, **options):
    async def run():
        async with CannedServer(body, status) as server:
            sent = request or BenchRequest(prompt, 3, 4)
            answer = await BACKENDS[backend](sent, CallOptions(server.url, **options))
        return answer, *server.seen[0]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "backend, stream, first_chunk",
    [("sglang", NATIVE, 1), ("sglang-oai", COMPLETIONS, 1), ("sglang-oai-chat", CHAT, 2)],
)
def test_streams(backend, stream, first_chunk):
    answer, _, body = ask(backend, stream)
    assert answer.success and answer.output_len == 4 and answer.prompt_len == 3 and answer.cached_tokens == 2
    assert 0 < answer.ttft <= answer.latency
    assert len(answer.itl) == 4 - first_chunk
    assert body["stream"] is True


def test_what_native_requests_send():
    _, path, body = ask("sglang", NATIVE, prompt=[5, 6, 7], extra_body={"priority": 1})
    assert path == "/generate"
    assert body["input_ids"] == [5, 6, 7] and body["priority"] == 1
    assert body["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}


def test_chat_writes_token_ids_as_text():
    _, path, body = ask("sglang-oai-chat", CHAT, prompt=[1, 2], decode=lambda ids: "two words")
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "two words"}]


PNG = "--dataset-name image --image-format png --image-content blank --random-input-len 5 --random-output-len 4"


def of_images(options: str) -> list[BenchRequest]:
    vocabulary = Vocabulary(lambda text: list(text.encode()), lambda ids: bytes(ids).decode(), [65, 66, 67])
    return image_requests(serving.parse_arguments(f"{PNG} {options}".split()), vocabulary)


def test_requests_with_images():
    requests = of_images("--num-prompts 4 --image-count 3 --random-image-count --image-resolution random:8x16-32x64")
    assert {len(request.images) for request in requests} <= {1, 2, 3} and len(requests) == 4
    for address in (address for request in requests for address in request.images):
        head, data = address.split(",")
        width, height = Image.open(io.BytesIO(base64.b64decode(data))).size
        assert head == "data:image/png;base64" and 8 <= height <= 32 and 16 <= width <= 64
    (request,) = of_images("--num-prompts 1 --image-resolution 20x10")
    _, _, body = ask("sglang-oai-chat", CHAT, request=request)
    kinds = [part["type"] for part in body["messages"][0]["content"]]
    assert kinds == ["text", "image_url"] and len(body["messages"][0]["content"][0]["text"]) == request.prompt_len
    assert ask("sglang", NATIVE, request=request)[2]["image_data"] == list(request.images)
    for wrong in ("1081p", "0x5", "random:9x9-8x9"):
        with pytest.raises(ValueError, match="--image-resolution"):
            of_images(f"--image-resolution {wrong}")


def test_adapters_headers_and_sampling():
    def read(options: str) -> argparse.Namespace:
        return serving.parse_arguments(["--lora-name", "a", "b", *options.split()])

    plain = [BenchRequest("x", 3, 4)] * 400
    counts = {}
    for kind in ("uniform", "distinct", "skewed"):
        args = read(f"--lora-request-distribution {kind} --lora-zipf-alpha 4")
        counts[kind] = sum(request.lora == "a" for request in with_adapters(plain, args))
    assert counts["distinct"] == 200 and 120 < counts["uniform"] < 280 < counts["skewed"] < 380
    args = read("--header X-A=1 X-B=p=q --api-key k --temperature 0.5 --top-p 0.9")
    assert headers_of(args) == {"Authorization": "Bearer k", "X-A": "1", "X-B": "p=q"}
    request = with_adapters(plain[:1], args)[0]
    _, _, body = ask("sglang", NATIVE, request=request, sampling=sampling_of(args))
    assert body["lora_path"] in ("a", "b") and body["sampling_params"]["temperature"] == 0.5
    _, _, body = ask("sglang-oai", COMPLETIONS, request=request, sampling=sampling_of(args))
    assert body["model"] == request.lora and body["top_p"] == 0.9
    with pytest.raises(ValueError, match="--header"):
        headers_of(read("--header X"))


def test_an_absent_server_is_named(capsys):
    async def run() -> None:
        async with httpx.AsyncClient() as client:
            await wait_until_ready(client, "http://127.0.0.1:9", 0.1)

    with pytest.raises(ValueError, match=r"no server is ready at http://127.0.0.1:9 .*--ready-check-timeout-sec"):
        asyncio.run(run())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("waiting for a server at http://127.0.0.1:9 (") and line.endswith("at most 0.1 s")


def test_without_streaming():
    body = json.dumps(native(4, "a b c d")).encode()
    answer, _, sent = ask("sglang", body, stream=False)
    assert answer.success and answer.output_len == 4 and answer.itl == [] and sent["stream"] is False


@pytest.mark.parametrize(
    "status, body", [(500, b"boom"), (200, b"data: [DONE]\n\n"), (200, sse({"error": {"message": "no"}}))]
)
def test_failures_are_no_answers(status, body):
    answer, *_ = ask("sglang", body, status)
    assert not answer.success and answer.error


def test_arrival_times():
    requests = [BenchRequest("x", 1, 1)] * 20

    async def run(rate: float) -> list[float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        return [loop.time() - began async for _ in serving.arrivals(requests, rate, serving.random.Random(3))]

    assert asyncio.run(run(float("inf")))[-1] < 0.2
    times = asyncio.run(run(100.0))
    assert 0.05 < times[-1] < 1.5 and times == sorted(times)


def test_concurrency_is_held_back():
    async def run():
        async with CannedServer(NATIVE, seconds=0.01) as server:
            requests = [BenchRequest("x", 3, 4)] * 12
            options = CallOptions(server.url)
            answers, seconds = await serving.run_load(
                requests, options, backend="sglang", max_concurrency=3, show_progress=False
            )
        return answers, seconds, server.most

    answers, seconds, most = asyncio.run(run())
    assert most == 3 and len(answers) == 12 and all(a.success for a in answers) and seconds > 0.03


def test_output_file_names():
    args = serving.parse_arguments(["--dataset-name", "random", "--num-prompts", "7", "--random-input-len", "5"])
    assert serving.default_output_file(args).startswith("sglang_") and serving.default_output_file(args).endswith(
        "_7_5_1024.jsonl"
    )
    args = serving.parse_arguments(["--backend", "sglang-oai"])
    assert serving.default_output_file(args).endswith("_1000_sharegpt.jsonl")
