"""/v1/score, /v1/rerank and /v1/classify: the engine's numbers as scores, and refusals."""

from __future__ import annotations

import dataclasses
import math
from array import array
from typing import Any

import pytest

from moe_engine.core.messages import AddRequest
from tests.server.fake_engine import POOLING, FakeClient
from tests.server.harness import post

CLASSES = dataclasses.replace(POOLING, head="linear", width=3, labels=("low", "middle", "high"))
ONE_SCORE = dataclasses.replace(CLASSES, width=1, labels=("LABEL_0",))


def classifier(pooling: Any = CLASSES) -> FakeClient:
    """A classifier with the scores: the number of tokens, then zeros; negative for an odd number."""
    fake = FakeClient(pooling=pooling)

    def scores(request: AddRequest) -> array[float]:
        count = len(request.prompt_ids)
        return array("f", [count * (-1) ** count, 0.0, 0.0][: pooling.width])

    fake.vector = scores
    return fake


def message(response: Any) -> str:
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


def test_score_of_a_classifier():
    body = {"query": [5, 6], "items": [[7], [8, 9]]}
    answer = post(classifier(), "/v1/score", body).json()
    assert answer["scores"] == [[-3.0, 0.0, 0.0], [4.0, 0.0, 0.0]]
    assert (answer["object"], answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == ("scoring", 7, 7)
    first, second = post(classifier(), "/v1/score", body | {"apply_softmax": True}).json()["scores"]
    assert sum(first) == pytest.approx(1) and second[0] == pytest.approx(math.exp(4) / (math.exp(4) + 2))
    assert "label_token_ids" in message(post(classifier(), "/v1/score", body | {"label_token_ids": [5]}))


@pytest.mark.parametrize("fake", [FakeClient(), classifier()], ids=["text", "classes"])
def test_a_score_that_was_aborted(fake: FakeClient):
    """By an update of weights, for instance: the client may send the request again."""
    fake.refuse = {"type": "abort", "message": "Aborted by a weight update"}
    labels = {} if fake.info.pooling else {"label_token_ids": [9]}
    answer = post(fake, "/v1/score", {"query": "a", "items": ["b"], **labels})
    found = answer.json()["error"]["message"]
    assert (answer.status_code, found) == (503, "the request was aborted: Aborted by a weight update")


@pytest.mark.parametrize("item_first", [False, True])
def test_prompts_of_a_score(item_first: bool):
    fake = classifier()
    post(fake, "/v1/score", {"query": [5, 6], "items": [[7]], "item_first": item_first})
    assert fake.requests[0].prompt_ids == ([7, 5, 6] if item_first else [5, 6, 7])
    texts = post(fake, "/v1/score", {"query": "Hello", "items": " world", "item_first": item_first}).json()
    joined = " worldHello" if item_first else "Hello world"
    assert texts["usage"]["prompt_tokens"] == len(fake.tokenizer.encode(joined))


def test_score_of_a_model_for_text():
    """Log-probabilities are the engine's, over all tokens or among the labels."""
    fake, body = FakeClient(), {"query": "a", "items": ["b", "c"], "label_token_ids": [9, 6]}
    answer = post(fake, "/v1/score", body).json()
    assert all(request.token_ids_logprob == [9, 6] and request.max_new_tokens == 1 for request in fake.requests)
    native = {"text": ["ab", "ac"], "return_logprob": True, "token_ids_logprob": [[9, 6]] * 2}
    outputs = post(FakeClient(), "/generate", native | {"sampling_params": {"max_new_tokens": 1}}).json()
    found = [[math.exp(e[0]) for e in one["meta_info"]["output_token_ids_logprobs"][0]] for one in outputs]
    assert answer["scores"] == [pytest.approx(row) for row in found]
    assert answer["usage"]["completion_tokens"] == 0
    normalized = post(FakeClient(), "/v1/score", body | {"apply_softmax": True}).json()["scores"]
    assert normalized == [pytest.approx([value / sum(row) for value in row]) for row in found]


def test_temperature_and_log_probabilities_of_a_score():
    """Against formulas over the scores without a temperature."""
    body = {"query": "a", "items": ["b", "c"], "label_token_ids": [9, 6], "apply_softmax": True, "temperature": 0.5}
    answer = post(FakeClient(), "/v1/score", body | {"return_token_logprobs": True}).json()
    plain = post(FakeClient(), "/v1/score", body | {"apply_softmax": False, "temperature": None}).json()
    assert [[math.exp(value) for value in row] for row in answer["token_logprobs"]] == [
        pytest.approx(row) for row in plain["scores"]
    ]
    wanted = [[value**2 / sum(other**2 for other in row) for value in row] for row in plain["scores"]]
    assert answer["scores"] == [pytest.approx(row) for row in wanted] and "token_logprobs" not in plain
    classes = {"query": [5], "items": [[6]], "apply_softmax": True, "temperature": 4}
    (row,) = post(classifier(), "/v1/score", classes).json()["scores"]
    assert row[0] == pytest.approx(math.exp(2 / 4) / (math.exp(2 / 4) + 2))


def test_labels_of_each_item_of_a_score():
    fake = FakeClient()
    body = {"items": ["b", "c"], "label_token_ids": [[9, 6], [8]]}  # without a query
    scores = post(fake, "/v1/score", body).json()["scores"]
    assert [request.token_ids_logprob for request in fake.requests] == [[9, 6], [8]]
    assert [len(row) for row in scores] == [2, 1]


def test_wrong_scores():
    items = {"query": "a", "items": ["b"]}
    for body, words in (
        (items | {"label_token_ids": [[5], [6]]}, "label_token_ids: has 2 lists for 1 items"),
        (items | {"label_token_ids": [[5, [6]]]}, "label_token_ids"),
        (items | {"label_token_ids": [5, [6]]}, "label_token_ids[0]: expected token ids"),
        (items | {"label_token_ids": [5], "temperature": 2}, "temperature: scales the scores of a softmax"),
        (items | {"label_token_ids": [5], "apply_softmax": True, "temperature": 0}, "temperature"),
        (items | {"label_token_ids": [5], "score_extraction_token": "<s>"}, "score_extraction_token: not available"),
        (items, "label_token_ids: is required"),
        (items | {"label_token_ids": [10**6]}, "outside the vocabulary"),
        (items | {"label_token_ids": list(range(30))}, "--max-logprobs"),
        ({"query": "a", "items": [[5]], "label_token_ids": [5]}, "items: query and items must all be texts"),
        ({"query": "a", "items": [], "label_token_ids": [5]}, "items"),
    ):
        assert words in message(post(FakeClient(), "/v1/score", body))
    assert "classification or reward model" in message(post(FakeClient(pooling=POOLING), "/v1/score", items))
    assert "return_token_logprobs" in message(post(classifier(), "/v1/score", items | {"return_token_logprobs": True}))


def test_rerank():
    fake = classifier(ONE_SCORE)
    documents = ["b", "b b", "b b b"]
    counts = [len(ids) for ids in fake.tokenizer.encode_pairs([("a", text) for text in documents])]
    scores = [count * (-1) ** count for count in counts]
    ranked = post(fake, "/v1/rerank", {"query": "a", "documents": documents}).json()
    assert [one["index"] for one in ranked] == sorted(range(3), key=lambda i: -scores[i])
    assert all((one["document"], one["score"]) == (documents[one["index"]], scores[one["index"]]) for one in ranked)
    short = post(
        fake, "/v1/rerank", {"query": "a", "documents": documents, "top_n": 1, "return_documents": False}
    ).json()
    assert short == [{**ranked[0], "document": None, "meta_info": short[0]["meta_info"]}]
    assert "documents[0]" in message(post(fake, "/v1/rerank", {"query": "a", "documents": ["b" * 100_000]}))
    for other in (FakeClient(), FakeClient(pooling=POOLING), classifier()):
        assert "with one score" in message(post(other, "/v1/rerank", {"query": "a", "documents": ["b"]}))


def test_relevance_in_the_form_of_cohere_and_jina():
    fake = classifier(ONE_SCORE)
    body = {"model": "any", "query": "a", "documents": ["b", {"text": "b b"}, "b b b"], "top_n": 2}
    ranked = post(fake, "/v1/rerank", body | {"documents": ["b", "b b", "b b b"]}).json()
    answer = post(fake, "/v2/rerank", body).json()
    results = [
        {
            "index": one["index"],
            "relevance_score": pytest.approx(1 / (1 + math.exp(-one["score"]))),
            "document": {"text": one["document"]},
        }
        for one in ranked
    ]
    assert answer["model"] == "any" and answer["results"] == results and len(results) == 2
    lengths = [len(ids) for ids in fake.tokenizer.encode_pairs([("a", text) for text in ("b", "b b", "b b b")])]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    short = post(fake, "/rerank", body | {"return_documents": False}).json()["results"]
    assert short == [{name: one[name] for name in ("index", "relevance_score")} for one in answer["results"]]
    assert "documents[0]" in message(post(fake, "/rerank", {"query": "a", "documents": [{"text": 5}]}))


def test_classify():
    answer = post(classifier(), "/v1/classify", {"input": [[5, 6], [7]], "model": "any"}).json()
    assert [one["label"] for one in answer["data"]] == ["low", "middle"]
    assert answer["data"][0]["probs"][0] == pytest.approx(math.exp(2) / (math.exp(2) + 2))
    assert (answer["object"], answer["model"], answer["data"][1]["num_classes"]) == ("list", "any", 3)
    assert "no classes" in message(post(FakeClient(pooling=POOLING), "/v1/classify", {"input": "a"}))
    assert "generates text" in message(post(FakeClient(), "/v1/classify", {"input": "a"}))
