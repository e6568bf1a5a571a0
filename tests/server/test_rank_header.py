"""The header X-Data-Parallel-Rank of SGLang's and vLLM's routers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fake_engine import POOLING, FakeClient
from tests.server.harness import CHAT, post

BODIES: dict[str, Any] = {
    "/generate": {"text": ["x", "y"]},
    "/v1/completions": {"prompt": ["x", "y"], "routed_dp_rank": 9},
    "/v1/chat/completions": {**CHAT, "n": 2, "data_parallel_rank": 9},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/v1/embeddings": {"input": ["x", "y"]},
}


def client_of(path: str) -> FakeClient:
    return FakeClient(pooling=POOLING) if path == "/v1/embeddings" else FakeClient()


@pytest.mark.parametrize("path", BODIES)
def test_the_header_chooses_the_rank(path: str):
    client = client_of(path)
    assert post(client, path, BODIES[path], headers={"x-data-parallel-rank": "0"}).status_code == 200
    assert client.requests and {request.routed_dp_rank for request in client.requests} == {0}
    refused = post(client_of(path), path, BODIES[path], headers={"x-data-parallel-rank": "3"})
    assert refused.status_code == 400 and "routed_dp_rank 3" in refused.text


@pytest.mark.parametrize("value", ["", "x", "-1", "1.0", "²", "123456789"])
def test_a_value_that_is_no_rank_is_refused(value: str):
    response = post(FakeClient(), "/v1/completions", {"prompt": "x"}, headers={"X-Data-Parallel-Rank": value.encode()})
    assert response.status_code == 400 and response.json()["error"]["param"] == "X-Data-Parallel-Rank"
