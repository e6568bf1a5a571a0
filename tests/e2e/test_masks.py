"""Masked tokens through HTTP: bad_words (late masks), allowed_token_ids (static masks) and custom logit processors, on
one rank and on several, with drafts, chunks, prefix cache and one step in flight. Other requests keep their tokens."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from moe_engine.custom_logit_processor import DisallowedTokensLogitsProcessor
from tests.e2e.server_process import ServerProcess

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(5)]

CHAIN = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2", "--speculative-eagle-topk", "1")
CHAIN += ("--speculative-num-draft-tokens", "3")
TREE = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2", "--speculative-eagle-topk", "2")
TREE += ("--speculative-num-draft-tokens", "4")
DP = ("--dp-size", "2", "--enable-dp-attention")
FORMS = {
    "one rank": (),
    "one rank, chain": CHAIN,
    "tp2, tree": ("--tp-size", "2", *TREE),
    "dp2, chain": ("--tp-size", "2", *DP, *CHAIN),
    "ep2, chain": ("--tp-size", "2", *DP, "--moe-a2a-backend", "all_to_all", *CHAIN),
}
COMMON = ("--dtype", "float32", "--chunked-prefill-size", "32", "--max-total-tokens", "4096", "--cpu-threads", "1")
HAS_DILL = find_spec("dill") is not None
LONG = "A short introduction of several sentences comes first. It is longer than a prefill chunk. " * 2
TEXTS = [
    LONG + "The cat sat on the",
    "What is 2 + 3?",
    "Once upon a time there was a small",
    "The capital of France is",
]
LENGTH = 16


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Answers of the first form."""
    return {}


PARTS = ("one rank, chain", "dp2, chain")
"""Forms whose ranks, groups and drafts also occur in other forms."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(form, marks=pytest.mark.exhaustive if form in PARTS else []) for form in FORMS],
)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    more = ("--enable-custom-logit-processor",) if HAS_DILL else ()
    with ServerProcess(tmp_path_factory.mktemp("server"), *COMMON, *more, *FORMS[request.param]) as server:
        yield server.client()


def generate(client: httpx.Client, text: str, sampling: dict[str, Any], **fields: Any) -> httpx.Response:
    parameters = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True, **sampling}
    return client.post("/generate", json={"text": text, "sampling_params": parameters, **fields})


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


def test_masked_requests_beside_others(client: httpx.Client, expected: dict[str, Any]) -> None:
    free = [tokens_of(generate(client, text, {})) for text in TEXTS]
    pairs = [tokens[5:7] for tokens in free]
    words = [client.post("/detokenize", json={"tokens": pair}).json()["text"].strip() for pair in pairs]
    wishes: list[tuple[str, dict[str, Any]]] = [(text, {}) for text in TEXTS]
    wishes += [(text, {"bad_words": [word]}) for text, word in zip(TEXTS, words)]
    wishes += [(text, {"allowed_token_ids": sorted(set(tokens[2:9]))}) for text, tokens in zip(TEXTS, free)]
    with ThreadPoolExecutor(len(wishes)) as pool:
        found = [tokens_of(answer) for answer in pool.map(lambda wish: generate(client, *wish), wishes)]
    count = len(TEXTS)
    assert found[:count] == free
    banned = [client.post("/tokenize", json={"prompt": word, "add_special_tokens": False}).json() for word in words]
    for tokens, ids in zip(found[count : 2 * count], (answer["tokens"] for answer in banned)):
        runs = pairwise(tokens) if len(ids) == 2 else zip(*(tokens[i:] for i in range(len(ids))))
        assert tuple(ids) not in [tuple(run) for run in runs]
    assert any(a != b for a, b in zip(found[count : 2 * count], free))
    for tokens, plain in zip(found[2 * count :], free):
        assert set(tokens) <= set(plain[2:9])
    assert found == expected.setdefault("tokens", found)
    answer = generate(client, TEXTS[0], {"logit_bias": {str(free[0][0]): -100.0}}).json()
    assert free[0][0] != answer["output_ids"][0]
    assert answer["meta_info"]["cached_tokens"] > 32 and answer["meta_info"]["prompt_tokens"] > 33


def test_openai_endpoints_take_the_fields(client: httpx.Client) -> None:
    body = {"model": "any", "prompt": TEXTS[0], "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    free = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    word = free.split()[0]
    answer = client.post("/v1/completions", json={**body, "bad_words": [word]})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"].split()[:1] != [word]


@pytest.mark.skipif(not HAS_DILL, reason="needs dill")
def test_custom_logit_processor(client: httpx.Client, expected: dict[str, Any]) -> None:
    processor = DisallowedTokensLogitsProcessor.to_str()
    free = [tokens_of(generate(client, text, {})) for text in TEXTS]
    wishes: list[tuple[str, dict[str, Any], dict[str, Any]]] = [(text, {}, {}) for text in TEXTS]
    for text, tokens in zip(TEXTS, free):
        wishes.append((text, {"custom_params": {"token_ids": tokens[3:5]}}, {"custom_logit_processor": processor}))
    wishes.append((TEXTS[0], {"custom_params": {}}, {"custom_logit_processor": processor}))
    broken = json.dumps({"callable": pickle.dumps(len).hex()})
    wishes.append((TEXTS[0], {}, {"custom_logit_processor": broken}))
    with ThreadPoolExecutor(len(wishes)) as pool:
        answers = list(pool.map(lambda wish: generate(client, wish[0], wish[1], **wish[2]), wishes))
    assert [answer.status_code for answer in answers[-2:]] == [400, 400]
    assert "DisallowedTokensLogitsProcessor raised KeyError" in answers[-2].text
    assert "expected a subclass of CustomLogitProcessor" in answers[-1].text
    found = [tokens_of(answer) for answer in answers[:-2]]
    assert found[: len(TEXTS)] == free
    for tokens, plain in zip(found[len(TEXTS) :], free):
        assert not set(tokens) & set(plain[3:5])
    assert found == expected.setdefault("custom", found)


def test_custom_processors_are_refused_without_the_flag(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, *COMMON) as server:
        answer = generate(server.client(), TEXTS[0], {}, custom_logit_processor='{"callable": "80"}')
    assert answer.status_code == 400 and "--enable-custom-logit-processor" in answer.text
