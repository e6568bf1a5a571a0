"""`cache_salt`: the engine gets the namespace of cached prefixes with the request."""

from __future__ import annotations

import itertools

import pytest

from tests.server.fake_engine import FakeClient
from tests.server.harness import CHAT, post

BODIES = {
    "/generate": {"text": "x"},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x"},
}


@pytest.mark.parametrize("path", BODIES)
def test_salts_and_keys_make_namespaces(path):
    client = FakeClient()
    pairs = list(itertools.product((None, "a", "ab", "1:a"), (None, "b", "a", "1:ab")))
    for salt, key in pairs * 2:
        fields = {"cache_salt": salt, "extra_key": key}
        assert post(client, path, BODIES[path] | fields).status_code == 200
    found = [request.extra_key for request in client.requests]
    assert found[: len(pairs)] == found[len(pairs) :], "the same salt and key: the same prefixes"
    salted = [name for name, (salt, _) in zip(found, pairs) if salt is not None]
    assert len(set(salted)) == len({(salt, key) for salt, key in pairs if salt is not None})
    assert found[: len(pairs)].count(None) == 1
    unsalted = {name for name, (salt, key) in zip(found, pairs) if salt is None and key not in ("1:ab",)}
    assert not unsalted & set(salted)


def test_each_prompt_of_a_batch_has_its_salt():
    client = FakeClient()
    assert post(client, "/generate", {"text": ["x", "y", "z"], "cache_salt": ["s", None, "t"]}).status_code == 200
    keys = {tuple(request.prompt_ids): request.extra_key for request in client.requests}
    assert sorted(map(str, keys.values())) == ["1:s", "1:t", "None"]


@pytest.mark.parametrize("salt", ["", 5, "\ud83d"])
def test_a_wrong_salt_is_named(salt):
    response = post(FakeClient(), "/v1/completions", {"prompt": "x", "cache_salt": salt})
    assert response.status_code == 400 and "cache_salt" in response.text
