"""Sampling values outside their ranges are refused with the field's name and never reach the engine."""

from __future__ import annotations

import json

import pytest

from tests.server.fake_engine import FakeClient
from tests.server.harness import post

OUTSIDE = [
    ("temperature", "1e300"),
    ("temperature", "Infinity"),
    ("temperature", "1e999"),
    ("top_p", "0"),
    ("top_k", "-2"),
    ("min_p", "2"),
    ("repetition_penalty", "0"),
    ("repetition_penalty", "5e-324"),
    ("frequency_penalty", "9"),
    ("presence_penalty", "-3"),
    ("n", "1.5"),
    ("stop", "[1]"),
    ("stop", json.dumps(["x"] * 5000)),
]


@pytest.mark.parametrize(("name", "value"), OUTSIDE, ids=lambda text: text[:12])
def test_values_outside_the_range(name: str, value: str) -> None:
    client = FakeClient()
    body = f'{{"text": "a", "sampling_params": {{"{name}": {value}}}}}'
    response = post(client, "/generate", body.encode())
    assert response.status_code == 400 and client.requests == []
    assert name in response.json()["error"]["message"] or value == "Infinity"


def test_top_k_of_zero_is_the_whole_vocabulary() -> None:
    client = FakeClient()
    assert post(client, "/v1/completions", {"prompt": "a", "top_k": 0}).status_code == 200
    assert client.requests[0].sampling["top_k"] == -1
