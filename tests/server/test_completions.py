"""`suffix` and `best_of` of /v1/completions."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moe_engine.core.messages import AddRequest
from moe_engine.tokenizer.fill_in_middle import FORMS
from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.types import PackedLogprobs
from tests.logprobs import Entry, pack
from tests.server.fake_engine import FakeClient
from tests.server.harness import post

PATH = "/v1/completions"


class Likelihoods(FakeClient):
    """A client whose i-th sequence has three tokens, each with the i-th log-probability."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = values
        self.script = lambda request: [20 + self.requests.index(request)] * 3 + [self.info.eos_token_ids[0]]

    def _logprobs(self, request: AddRequest, tokens: list[int], *, first: bool = False) -> PackedLogprobs:
        value = self.values[self.requests.index(request)]
        return pack([Entry(token, value, ((token, value),) * request.top_logprobs) for token in tokens],
                    request.top_logprobs, 0)  # fmt: skip


@pytest.mark.parametrize("logprobs", [None, 1])
def test_best_of_answers_the_likeliest(logprobs: int | None) -> None:
    values = [-random.random() for _ in range(8)]
    client = Likelihoods(values)
    body = {"prompt": [[5], [6]], "n": 2, "best_of": 4, "logprobs": logprobs, "max_tokens": 9}
    answer = post(client, PATH, body).json()
    wanted = [i for part in (range(4), range(4, 8)) for i in sorted(part, key=lambda i: -values[i])[:2]]
    assert [choice["text"] for choice in answer["choices"]] == [client.tokenizer.decode([20 + i] * 3) for i in wanted]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 8 * 4, "of all sequences"
    for choice, i in zip(answer["choices"], wanted):
        shown = choice["logprobs"]
        assert (shown is None) == (logprobs is None)
        assert shown is None or shown["token_logprobs"] == pytest.approx([values[i]] * 4)


def test_best_of_n_is_n() -> None:
    client = FakeClient()
    answer = post(client, PATH, {"prompt": "a", "n": 2, "best_of": 2}).json()
    assert len(answer["choices"]) == len(client.requests) == 2
    assert not any(request.return_logprob for request in client.requests)


@pytest.mark.parametrize("form", FORMS)
def test_suffix(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client, seen = FakeClient(), list[Any]()
    known, encode = client.tokenizer.token_id, client.tokenizer.encode_batch
    ids = dict.fromkeys(FORMS[form], 5)
    monkeypatch.setattr(Tokenizer, "token_id", lambda self, token: ids.get(token, known(token)))
    monkeypatch.setattr(
        Tokenizer, "encode_batch", lambda self, texts, *more: seen.extend(texts) or encode(texts, *more)
    )
    before, hole, end = FORMS[form]
    assert post(client, PATH, {"prompt": ["a", "c"], "suffix": "b"}).status_code == 200
    assert post(client, PATH, {"prompt": "a", "suffix": "b"}, completion_template=form).status_code == 200
    assert [text for text in seen if before in text] == [f"{before}{one}{hole}b{end}" for one in "aca"]
    other = next(name for name in FORMS if name != form)
    refused = post(client, PATH, {"prompt": "a", "suffix": "b"}, completion_template=other)
    assert refused.status_code == 400 and "--completion-template" in refused.text
    assert post(client, PATH, {"prompt": "a", "suffix": ""}).status_code == 200
    assert "a" in seen
