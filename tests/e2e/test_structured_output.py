"""Structured output through HTTP and the official client, on one rank and on several, with drafts, beside free
requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.e2e.server_process import ServerProcess
from tests.e2e.test_masks import CHAIN, DP, TREE

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(6)]

FORMS = {
    "one rank": (),
    "tp2, tree": ("--tp-size", "2", *TREE),
    "ep2, chain": ("--tp-size", "2", *DP, "--moe-a2a-backend", "all_to_all", *CHAIN),
    "two replicas": ("--dp-size", "2"),
}
COMMON = ("--dtype", "float32", "--chunked-prefill-size", "32", "--max-total-tokens", "4096", "--cpu-threads", "1")
COMMON += ("--max-running-requests", "8")
TEXTS = ["What is 2 + 3?", "Once upon a time there was a small", "The capital of France is"]


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["city", "river"]
    number: Literal[1, 2, 3]
    open: bool


SCHEMA = Place.model_json_schema()
CONSTRAINTS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"regex": "[0-9]{3}-[a-f]{2}"},
    {"ebnf": 'root ::= "yes" | "no" " " [0-9]'},
    {"choice": ["Paris", "Rome", "Oslo"]},
]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Greedy tokens of the first form."""
    return {}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(form, marks=[] if form in ("one rank", "ep2, chain") else pytest.mark.exhaustive) for form in FORMS
    ],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), *COMMON, *FORMS[request.param]) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def generate(http: httpx.Client, text: str, sampling: dict[str, Any]) -> httpx.Response:
    parameters = {"temperature": 0, "max_new_tokens": 60, **sampling}
    return http.post("/generate", json={"text": text, "sampling_params": parameters})


def test_greedy_tokens_and_free_neighbors(server: ServerProcess, expected: dict[str, Any]) -> None:
    """More requests than run at once."""
    with server.client() as http:
        free = [generate(http, text, {}).json()["output_ids"] for text in TEXTS]
        wishes = [(text, wish) for text in TEXTS for wish in [*CONSTRAINTS, {}]]
        with ThreadPoolExecutor(len(wishes)) as pool:
            answers = list(pool.map(lambda wish: generate(http, *wish), wishes))
        assert {answer.status_code for answer in answers} == {200}
        found = [answer.json()["output_ids"] for answer in answers]
        assert found[len(CONSTRAINTS) :: len(CONSTRAINTS) + 1] == free
        assert found == expected.setdefault("tokens", found)


def test_official_client(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "A place, please."}]}
    parsed = client.chat.completions.parse(**ask, response_format=Place, max_tokens=120, temperature=1.3).choices[0]
    assert parsed.finish_reason == "stop" and isinstance(parsed.message.parsed, Place)
    format = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    chunks = list(client.chat.completions.create(**ask, response_format=format, max_tokens=120, stream=True))
    Place.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    either = client.chat.completions.create(**ask, extra_body={"guided_choice": ["left", "right"]}, n=3, temperature=2)
    assert {choice.message.content for choice in either.choices} <= {"left", "right"}
    any_object = client.chat.completions.create(**ask, response_format={"type": "json_object"}, max_tokens=3).choices[0]
    assert (any_object.message.content or "").lstrip().startswith("{")
    cut = client.chat.completions.create(**ask, response_format=format, max_tokens=3).choices[0]  # type: ignore[call-overload]
    assert cut.finish_reason == "length" and (cut.message.content or "").lstrip().startswith("{")
    text = client.completions.create(
        model="any", prompt="Number: ", temperature=1, extra_body={"regex": "[1-9][0-9]{2}"}
    )
    assert len(text.choices[0].text) == 3 and text.choices[0].text.isdigit()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}}, "not"),
        ({"extra_body": {"regex": "(a"}}, "regex"),
        ({"extra_body": {"regex": "a", "guided_choice": ["a"]}}, "guided_choice"),
    ],
)
def test_refusals(client: openai.OpenAI, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x"}], **fields)


def test_clients_that_leave_and_a_heavy_grammar(server: ServerProcess, client: openai.OpenAI) -> None:
    """No request remains, and the grammar of one request blocks no other."""
    enum = {"enum": [f"{i:x}-{i * 7919:x}" for i in range(20000)]}
    with server.client() as http, ThreadPoolExecutor(6) as pool:
        heavy = pool.submit(generate, http, "x", {"json_schema": enum, "max_new_tokens": 20})
        for _ in range(4):
            body = {"text": "x", "stream": True, "sampling_params": {"regex": "[0-9]{400}", "max_new_tokens": 400}}
            with http.stream("POST", "/generate", json=body) as stream:
                next(stream.iter_lines())
        assert generate(http, TEXTS[0], {}).status_code == 200
        assert heavy.result().status_code in (200, 400)
        for load in http.get("/v1/loads").json()["loads"]:
            assert load["num_waiting_reqs"] == 0
        server.wait_idle()
