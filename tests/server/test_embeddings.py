"""Vectors over HTTP: OpenAI's client, both encodings of numbers, dimensions, refusals on a server of the other kind."""

from __future__ import annotations

import base64
import dataclasses
import math
from array import array
from typing import Any

import openai
import pytest

from tests.server.fake_engine import POOLING, FakeClient
from tests.server.harness import CHAT, get, post, real_server

NORMALIZED = dataclasses.replace(POOLING, normalizes=True)
CLASSES = dataclasses.replace(POOLING, head="linear", labels=("a", "b", "c", "d"))


@pytest.fixture(scope="module")
def client():
    with (
        real_server(FakeClient(pooling=NORMALIZED), enable_cache_report=True) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def test_every_form_of_input(client):
    """The client asks for base64 and decodes it; float32 values are exact."""
    for given, counts in (("Hello", [2]), (["Hello", "a"], [2, 2]), ([5, 6, 7], [3]), ([[5], [6, 7]], [1, 2])):
        answer = client.embeddings.create(model="any", input=given)
        assert [item.index for item in answer.data] == list(range(len(counts)))
        assert [item.embedding[:3] for item in answer.data] == [[count, 2.0, 3.0] for count in counts]
        assert (answer.object, answer.model, answer.data[0].object) == ("list", "any", "embedding")
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(counts)
    floats = client.embeddings.create(model="any", input="Hello", encoding_format="float")
    assert floats.data[0].embedding[:3] == [2.0, 2.0, 3.0]


def test_dimensions_normalize_again(client):
    (item,) = client.embeddings.create(model="any", input=[5, 6, 7], dimensions=2).data
    assert item.embedding == pytest.approx([3 / math.sqrt(13), 2 / math.sqrt(13)])
    for wrong, words in ((0, ">= 1"), (5, "more than the 4 numbers")):
        with pytest.raises(openai.BadRequestError, match=words) as info:
            client.embeddings.create(model="any", input="a", dimensions=wrong)
        assert info.value.param == "dimensions"


def test_wrong_inputs(client):
    for given, words in (([], "input"), ("", "input"), ([10**6], "outside the vocabulary"), ([5] * 300, "is longer")):
        with pytest.raises(openai.BadRequestError, match=words):
            client.embeddings.create(model="any", input=given)
    with pytest.raises(openai.BadRequestError, match="encoding_format"):
        client.embeddings.create(model="any", input="a", encoding_format="hex")


def test_objects_and_messages_without_a_vision_tower():
    """Rendered by the chat template (begin, user, text, and before an answer the assistant); images are refused."""
    fake = FakeClient(pooling=POOLING)
    answer = post(fake, "/v1/embeddings", {"input": [{"text": "Hello"}, {"text": "a", "image": None}]})
    assert [item["embedding"][0] for item in answer.json()["data"]] == [4.0, 4.0]
    message = {"role": "user", "content": "Hello"}
    answer = post(fake, "/v1/embeddings", {"messages": [message]})
    assert answer.json()["data"][0]["embedding"][0] == 3.0 == answer.json()["usage"]["prompt_tokens"]
    for body, words in (
        ({"input": [{"image": "data:,x"}]}, "input[0].image: "),
        ({"input": "a", "messages": [message]}, "exactly one of input and messages"),
        ({}, "exactly one of input and messages"),
    ):
        refused = post(fake, "/v1/embeddings", body)
        assert refused.status_code == 400 and words in refused.text, refused.text


def test_base64_is_little_endian():
    answer = post(FakeClient(pooling=POOLING), "/v1/embeddings", {"input": [5, 6], "encoding_format": "base64"})
    data = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert data[:4] == b"\0\0\0\x40" and array("f", data)[1] == 2.0


def test_native_endpoints():
    for path in ("/encode", "/classify"):
        one = post(
            FakeClient(pooling=CLASSES), path, {"input_ids": [5, 6], "rid": "mine", "sampling_params": {}}
        ).json()
        assert one["embedding"] == [2.0, 2.0, 3.0, 5.0]
        assert (one["meta_info"]["id"], one["meta_info"]["prompt_tokens"]) == ("mine", 2)
        many = post(FakeClient(pooling=POOLING), path, {"text": ["Hello", "a"], "dimensions": 1}).json()
        assert [output["embedding"] for output in many] == [[2.0], [2.0]]
    refused = post(FakeClient(pooling=CLASSES), "/encode", {"text": "a", "dimensions": 1})
    assert refused.status_code == 400 and "has a score head" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
    ],
)
def test_a_server_for_vectors_generates_no_text(path: str, body: dict[str, Any]):
    refused = post(FakeClient(pooling=POOLING), path, body)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "served for vectors, not for text" in message and "--is-embedding" in message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/encode", {"text": "a"}),
        ("/classify", {"text": "a"}),
        ("/v1/classify", {"input": "a"}),
    ],
)
def test_a_server_for_text_gives_no_vectors(path: str, body: dict[str, Any]):
    refused = post(FakeClient(), path, body)
    assert refused.status_code == 400
    assert "need a server with --is-embedding" in refused.json()["error"]["message"]


def test_health_and_model_info():
    fake = FakeClient(pooling=POOLING)
    assert get(fake, "/health_generate").status_code == 200
    assert fake.requests[0].max_new_tokens == 0
    assert get(fake, "/model_info").json()["is_generation"] is False
    assert get(FakeClient(), "/model_info").json()["is_generation"] is True


def test_requests_without_a_vector():
    fake = FakeClient(pooling=POOLING)
    fake.refuse = {"type": "abort", "message": "Aborted"}
    refused = post(fake, "/encode", {"text": "a"})
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the request was aborted: Aborted")
    fake = FakeClient(pooling=POOLING)
    fake.vector = lambda request: array("f", [math.nan, 1.0])
    failed = post(fake, "/v1/embeddings", {"input": "a"})
    assert failed.status_code == 500 and "not finite" in failed.json()["error"]["message"]
