"""`Frontend` alone: outputs, streams, stop strings, batches, limits, abort and failure."""

from __future__ import annotations

import asyncio
import base64
import itertools
from array import array
from typing import Any

import pytest

from moe_engine.core.messages import RequestDelta
from moe_engine.errors import EngineDeadError, GenerationError, InputError
from moe_engine.frontend.client_api import CallError
from moe_engine.frontend.frontend import Frontend, FrontendSettings
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.pausing import Pausing
from moe_engine.frontend.prepare import BURST
from moe_engine.server.native_types import Output
from tests.server.fake_engine import FakeClient, clients_id
from tests.server.harness import TEXT, events, post
from tests.server.test_schema import conforms


def generate(client, settings=None, **fields) -> Any:
    return asyncio.run(Frontend(client, client.tokenizer, settings).generate(GenerateInput(**fields)))


def stream(client, settings=None, **fields):
    async def main():
        frontend = Frontend(client, client.tokenizer, settings)
        return [chunk async for chunk in frontend.stream(GenerateInput(**fields))]

    return asyncio.run(main())


def test_weight_version_is_the_operators():
    settings = FrontendSettings(weight_version="2026-08-01")
    assert generate(FakeClient(), settings, text="Hello")["meta_info"]["weight_version"] == "2026-08-01"


def test_output_shape():
    client = FakeClient()
    out = generate(client, text="Hello", rid="me")
    ids = client.tokenizer.encode(TEXT, False)
    assert out["text"] == TEXT
    assert out["output_ids"] == [*ids, 1]
    meta = out["meta_info"]
    assert meta["id"] == "me"
    assert meta["finish_reason"] == {"type": "stop", "matched": 1}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, len(ids) + 1, 2)
    assert meta["weight_version"] == "default"
    assert meta["total_retractions"] == 0
    assert meta["queue_time"] == 0.25
    assert meta["e2e_latency"] >= meta["first_token_latency"] >= 0
    request = client.requests[0]
    assert request.prompt_ids == client.tokenizer.encode("Hello")
    assert request.max_new_tokens == 128
    assert not client.running
    assert not client.closed_early


@pytest.mark.parametrize("per_step", [1, 2, 5, 100])
@pytest.mark.parametrize("streaming", [False, True])
def test_stop_strings_cut_the_same_whatever_the_steps(per_step, streaming):
    client = FakeClient()
    client.per_step = per_step
    fields = {"text": "x", "rid": "r", "sampling_params": {"stop": ["are y", "zzz"]}}
    if streaming:
        chunks = stream(client, **fields)
        out = chunks[-1]
        assert all(out["text"].startswith(c["text"]) for c in chunks)
    else:
        out = generate(client, **fields)
    assert out["text"] == "Hello world, how "
    assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": "are y"}
    want = next(n for n in range(20) if "are y" in client.tokenizer.decode(client.tokenizer.encode(TEXT, False)[:n]))
    assert out["meta_info"]["completion_tokens"] == len(out["output_ids"]) == want
    if per_step < 5:
        assert client.closed_early == ["r"]  # the engine received the abort


def test_no_stop_trim_keeps_the_stop_and_the_end_token_hidden():
    sampling = {"stop": "how", "no_stop_trim": True}
    assert generate(FakeClient(), text="x", sampling_params=sampling)["text"] == "Hello world, how"
    whole = {"no_stop_trim": True, "skip_special_tokens": False}
    assert generate(FakeClient(), text="x", sampling_params=whole)["text"] == TEXT + "<｜end▁of▁sentence｜>"
    trimmed = {"skip_special_tokens": False}
    assert generate(FakeClient(), text="x", sampling_params=trimmed)["text"] == TEXT


def test_length_and_zero():
    out = generate(FakeClient(), text="x", sampling_params={"max_new_tokens": 2})
    assert out["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert out["text"] == "Hello world"
    client = FakeClient()
    out = generate(client, text="x", sampling_params={"max_new_tokens": 0})
    assert (out["text"], out["output_ids"]) == ("", [])
    assert out["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert client.requests[0].max_new_tokens == 1


def test_cumulative_and_incremental_streams():
    for streaming in (False, True):
        chunks = stream(FakeClient(), FrontendSettings(incremental_streaming_output=streaming), text="x")
        texts = [c["text"] for c in chunks]
        assert ("".join(texts) if streaming else texts[-1]) == TEXT
        ids = [i for c in chunks for i in c["output_ids"]] if streaming else chunks[-1]["output_ids"]
        assert ids == [*FakeClient().tokenizer.encode(TEXT, False), 1]
        assert [c["meta_info"]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert [c["meta_info"]["completion_tokens"] for c in chunks] == list(range(1, len(chunks) + 1))


def test_stream_interval():
    counts = [c["meta_info"]["completion_tokens"] for c in stream(FakeClient(), FrontendSettings(4), text="x")]
    assert counts == [1, 5, 9]
    chunks = stream(FakeClient(), text="x", sampling_params={"stream_interval": 3})
    assert [c["meta_info"]["completion_tokens"] for c in chunks] == [1, 4, 7, 9]


def test_unfinished_character_at_the_end():
    client = FakeClient("🙂")
    ids = client.tokenizer.encode("🙂", False)
    assert len(ids) > 1
    chunks = stream(client, text="x", sampling_params={"max_new_tokens": len(ids) - 1})
    assert [c["text"] for c in chunks[:-1]] == [""] * (len(ids) - 2)
    assert set(chunks[-1]["text"]) == {"\ufffd"}


def test_batch_and_n():
    client = FakeClient()
    prompt = "The quick brown fox jumps over the lazy dog. 0123456789" * 4
    outs = generate(
        client, text=[prompt, "b"], rid="r", sampling_params=[{"n": 2, "sampling_seed": 7}, {"max_new_tokens": 1}]
    )
    assert [o["meta_info"]["id"] for o in outs] == ["r_0_0", "r_0_1", "r_1"]
    assert [o["meta_info"]["completion_tokens"] for o in outs] == [9, 9, 1]
    by_rid = {clients_id(r): r for r in client.requests}
    assert by_rid["r_0_0"].seed == 7 and len({request.seed for request in client.requests}) == 3
    assert [clients_id(r) for r in client.requests] == ["r_0_0", "r_1", "r_0_1"]  # the copy waited for the prompt
    chunks = stream(FakeClient(), text=["a", "b"])
    assert {c["index"] for c in chunks} == {0, 1}
    assert [c["text"] for c in chunks if c["meta_info"]["finish_reason"]] == [TEXT, TEXT]


def test_logprobs():
    fields = {
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
        "token_ids_logprob": [5],
        "return_text_in_logprobs": True,
    }
    meta = generate(FakeClient(), text="Hello world", sampling_params={"stop": "world"}, **fields)["meta_info"]
    assert [e[2] for e in meta["input_token_logprobs"]] == ["Hello", " world"]
    assert meta["output_token_logprobs"] == [
        [-0.5, e[1], t] for e, t in zip(meta["output_token_logprobs"], ["Hello", " world"])
    ]
    assert meta["output_token_logprobs_length"] == meta["completion_tokens"] == 2
    assert [len(e) for e in meta["output_top_logprobs"]] == [2, 2]
    assert [[e[:2] for e in p] for p in meta["input_token_ids_logprobs"]] == [[[-3.0, 5]], [[-3.0, 5]]]
    first = generate(FakeClient(), text="x", return_logprob=True, logprob_start_len=0)["meta_info"]
    assert first["input_token_logprobs"][0] == [None, 0, None]
    assert generate(FakeClient(), text="x", return_logprob=True)["meta_info"]["input_token_logprobs"] == []


def test_limits():
    client = FakeClient(context_len=50, max_total_num_tokens=100, max_req_input_len=45)
    generate(client, input_ids=[5] * 10, sampling_params={"max_new_tokens": None})
    assert client.requests[0].max_new_tokens == 40
    client = FakeClient(context_len=1000, max_total_num_tokens=64, max_req_input_len=63, page_size=16)
    generate(client, input_ids=[5] * 10, sampling_params={"max_new_tokens": None})
    assert client.requests[0].max_new_tokens == 54


def test_auto_truncate():
    client = FakeClient(context_len=50, max_total_num_tokens=100, max_req_input_len=45)
    settings = FrontendSettings(allow_auto_truncate=True)
    out = generate(client, settings, input_ids=[5] * 80, sampling_params={"max_new_tokens": 70, "ignore_eos": True})
    assert (len(client.requests[0].prompt_ids), client.requests[0].max_new_tokens) == (45, 5)
    assert out["meta_info"]["completion_tokens"] == 5
    generate(client, settings, text="Hello " * 500)
    assert len(client.requests[1].prompt_ids) == 45


@pytest.mark.parametrize("incremental", [False, True])
def test_token_ids_of_the_prompt(incremental: bool):
    """In the answer and in every chunk of a stream; the vocabulary's ids, of each prompt of a batch."""
    client = FakeClient()
    expected = [client.tokenizer.encode(text) for text in ("one", "two words")]
    body = {"text": ["one", "two words"], "return_prompt_token_ids": True, "sampling_params": {"max_new_tokens": 2}}
    settings = {"incremental_streaming_output": incremental}
    for answer, ids in zip(post(client, "/generate", body, **settings).json(), expected):
        conforms(answer, Output)
        assert answer["prompt_token_ids"] == ids
    chunks = events(post(client, "/generate", {**body, "stream": True}, **settings))
    assert chunks and all(chunk["prompt_token_ids"] == expected[chunk["index"]] for chunk in chunks)
    del body["return_prompt_token_ids"]
    assert not any("prompt_token_ids" in answer for answer in post(client, "/generate", body).json())


def test_ids_only():
    client = FakeClient()
    frontend = Frontend(client, None)
    out: Any = asyncio.run(frontend.generate(GenerateInput(input_ids=[5, 6])))
    assert "text" not in out
    assert out["output_ids"][-1] == 1
    with pytest.raises(InputError, match="--skip-tokenizer-init"):
        asyncio.run(frontend.generate(GenerateInput(text="x")))
    with pytest.raises(InputError, match="stop_token_ids"):
        asyncio.run(frontend.generate(GenerateInput(input_ids=[5], sampling_params={"stop": "x"})))


def test_engine_death_and_refusal():
    client = FakeClient()
    client.fail_after = 2
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        generate(client, text=["a", "b"])
    assert not client.running
    client = FakeClient()
    client.refuse = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    with pytest.raises(InputError, match="queue is full") as info:
        generate(client, text="a")
    assert info.value.status == 503
    client.refuse = {"type": "abort", "message": "logits are not finite", "status_code": 500}
    with pytest.raises(GenerationError, match="not finite"):  # not an error of the request
        generate(client, text="a")
    client.refuse = {"type": "abort", "message": "Aborted", "status_code": None}
    assert generate(client, text="a")["meta_info"]["finish_reason"]["type"] == "abort"


async def test_closing_a_stream_aborts_everything():
    client = FakeClient()
    client.delay = 0.01
    frontend = Frontend(client, client.tokenizer)
    chunks = frontend.stream(GenerateInput(text=["a", "b", "c"]))
    await anext(chunks)
    assert len(frontend._live) == 3
    await chunks.aclose()
    assert not frontend._live
    assert len(client.closed_early) == 3


async def test_duplicate_rid_while_live():
    client = FakeClient()
    client.delay = 0.01
    frontend = Frontend(client, client.tokenizer)
    first = frontend.stream(GenerateInput(text="a", rid="same"))
    await anext(first)
    with pytest.raises(InputError, match="'same' is still running"):
        await frontend.generate(GenerateInput(text="b", rid="same"))
    await first.aclose()
    await frontend.generate(GenerateInput(text="b", rid="same"))


def test_preferred_sampling_params():
    client = FakeClient()
    settings = FrontendSettings(preferred_sampling_params={"max_new_tokens": 3, "temperature": 0.5})
    generate(client, settings, text="x", sampling_params={"temperature": 0.1})
    assert client.requests[0].max_new_tokens == 3
    assert client.requests[0].sampling["temperature"] == 0.1


def test_a_default_length_is_cut_where_an_asked_one_is_refused():
    client = FakeClient(context_len=50, max_total_num_tokens=100, max_req_input_len=45)
    for sampling in (None, {"temperature": 0}):
        generate(client, input_ids=[5] * 40, sampling_params=sampling)
        assert client.requests[-1].max_new_tokens == 10
    settings = FrontendSettings(preferred_sampling_params={"max_new_tokens": 30})
    generate(client, settings, input_ids=[[5] * 40, [5] * 10])
    assert [request.max_new_tokens for request in client.requests[-2:]] == [10, 30]
    with pytest.raises(InputError, match="maximum context length of 50 tokens"):
        generate(client, settings, input_ids=[5] * 40, sampling_params={"max_new_tokens": 30})


@pytest.mark.parametrize(
    "fields", [{"sampling_params": {"stop": "\ud83d"}}, {"extra_key": "a\ud83d"}, {"text": "\udc00"}]
)
def test_half_surrogates_are_refused_without_http_too(fields):
    with pytest.raises(InputError, match="is half of a surrogate pair"):
        generate(FakeClient(), **{"text": "a", **fields})


async def test_a_large_batch_leaves_the_event_loop_to_others():
    """A thread checks the requests; other work runs after every BURST new sequences."""
    client, count, turns, begun = FakeClient(), 10 * BURST, 0, [0]

    async def others():
        nonlocal turns
        while len(client.requests) < count:
            turns += 1
            begun.append(len(client.requests))
            await asyncio.sleep(0)

    probe = asyncio.create_task(others())
    frontend = Frontend(client, client.tokenizer)
    job = await frontend.prepare(GenerateInput(input_ids=[[5]] * count))
    before = turns
    await frontend.collect(job)
    await probe
    assert before >= 10
    assert max(late - early for early, late in itertools.pairwise(begun)) <= BURST


def test_hidden_states_of_openai_choices():
    """tests/distributed/engine/test_hidden_states.py tests the engine's part."""
    client = FakeClient(hidden_size=2)

    async def deltas(request):
        states = array("f", range(2 * (len(request.prompt_ids) + 2))).tobytes()
        yield RequestDelta(request.rid, [5, 6, 7], {"type": "length", "length": 3}, vector=states)

    client._deltas = deltas
    body = {"prompt": [3, 4], "return_hidden_states": True}
    settings = {"enable_return_hidden_states": True}
    choice = post(client, "/v1/completions", body, **settings).json()["choices"][0]
    assert choice["hidden_states"] == [6.0, 7.0]
    shown = post(client, "/generate", {"input_ids": [3, 4], "return_hidden_states": True}, **settings).json()
    assert shown["meta_info"]["hidden_states"] == [[[0.0, 1.0], [2.0, 3.0]], [4.0, 5.0], [6.0, 7.0]]
    assert "hidden_states" not in post(client, "/v1/completions", {"prompt": [3, 4]}, **settings).json()["choices"][0]
    streamed = post(client, "/v1/completions", body | {"stream": True}, **settings)
    for refused in (post(client, "/v1/completions", body), streamed):
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "return_hidden_states"


def test_experts_of_tokens_in_the_encoding_of_sglang():
    """tests/distributed/engine/test_routed_experts.py tests the engine's part."""
    client = FakeClient(experts_width=2)

    async def deltas(request):  # the client may not see the last token: of a stop string
        experts = array("h", range(2 * (len(request.prompt_ids) + 2))).tobytes()
        yield RequestDelta(request.rid, [5], None, vector=experts[:8])
        yield RequestDelta(request.rid, [6, 7], {"type": "length", "length": 3}, vector=experts[8:])

    def decoded(text: str) -> list[int]:
        return array("i", base64.b64decode(text)).tolist()

    client._deltas = deltas
    settings = {"enable_return_routed_experts": True}
    asked = {"return_routed_experts": True}
    answer = post(client, "/generate", {"input_ids": [3, 4], **asked}, **settings).json()
    assert decoded(answer["meta_info"]["routed_experts"]) == [0, 1, 2, 3, 4, 5, 6, 7]
    conforms(answer, Output)
    for start in range(3):
        body = {"input_ids": [3, 4], "routed_experts_start_len": start, **asked}
        shown = post(client, "/generate", body, **settings).json()["meta_info"]["routed_experts"]
        assert decoded(shown) == [0, 1, 2, 3, 4, 5, 6, 7][2 * start :]
    *chunks, last = events(post(client, "/generate", {"input_ids": [3, 4], "stream": True, **asked}, **settings))
    assert decoded(last["meta_info"]["routed_experts"]) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert not any("routed_experts" in chunk["meta_info"] for chunk in chunks)
    answer = post(client, "/v1/completions", {"prompt": [3, 4], **asked}, **settings).json()
    assert decoded(answer["sglext"]["routed_experts"]) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert "sglext" not in post(client, "/v1/completions", {"prompt": [3, 4]}, **settings).json()
    for path, body, field in (
        ("/v1/completions", {"prompt": [3, 4], **asked}, "return_routed_experts"),
        ("/generate", {"input_ids": [3], **asked}, "return_routed_experts"),
        ("/generate", {"input_ids": [3], **asked, "routed_experts_start_len": 2}, "routed_experts_start_len"),
        ("/generate", {"input_ids": [3], **asked, "routed_experts_start_len": -1}, "routed_experts_start_len"),
    ):
        refused = post(client, path, body, **(settings if field.endswith("len") else {}))
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field, refused.text


def test_reasoning_tokens_of_native_requests():
    client = FakeClient("let me think</think>Paris")
    want = len(client.tokenizer.encode("let me think</think>", False))
    body = {"text": "x", "require_reasoning": True}
    settings = {"reasoning_parser": "deepseek-v3"}
    counts = [
        chunk["meta_info"]["reasoning_tokens"]
        for chunk in events(post(client, "/generate", body | {"stream": True}, **settings))
    ]
    assert counts == [min(want, number) for number in range(1, len(counts) + 1)] and len(counts) > want
    assert post(client, "/generate", body, **settings).json()["meta_info"]["reasoning_tokens"] == want
    plain = post(client, "/generate", {"text": "x"}, **settings).json()["meta_info"]
    assert plain["reasoning_tokens"] == 0


async def test_generation_continues_behind_an_update_of_paused_requests(monkeypatch):
    """A step between the flush of the prefix cache and the new weights would leave KV of the old weights in it."""
    calls: list[str] = []

    async def call(method: str, **args: Any) -> list[Any]:
        calls.append(method)
        return []

    client = FakeClient()
    monkeypatch.setattr(client, "call", call)
    frontend = Frontend(client, client.tokenizer)
    pausing = Pausing(frontend)
    await pausing.pause("retract")
    async with frontend.weights.exclusive(None, lambda: None):
        resumed = asyncio.create_task(pausing.resume())
        await asyncio.sleep(0.05)
        assert calls == ["pause"] and frontend.paused
    assert await resumed and calls == ["pause", "resume"]
    async with frontend.weights.exclusive(9.0, lambda: None):
        assert not await pausing.resume()  # without a pause it waits for nothing


async def test_generation_is_paused_when_one_scheduler_fails_during_the_call(monkeypatch):
    """The other schedulers are paused: the frontend knows it, and they continue."""
    calls: list[str] = []

    async def call(method: str, **args: Any) -> list[Any]:
        calls.append(method)
        if method == "pause":
            raise CallError("pause: rank 0: out of memory")
        return []

    client = FakeClient()
    monkeypatch.setattr(client, "call", call)
    frontend = Frontend(client, client.tokenizer)
    pausing = Pausing(frontend)
    with pytest.raises(CallError):
        await pausing.pause()
    assert frontend.paused and await pausing.resume() and calls == ["pause", "resume"] and not frontend.paused
