"""Two real servers over each transport: the tokens of one server, with KV transferred instead of computed."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest

from tests.disaggregation.pair import FLAGS, Pair
from tests.disaggregation.transport_names import each_transport
from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", each_transport())
def test_tokens_are_those_of_one_server(transport: str, tmp_path: Path) -> None:
    ids = [[random.randrange(20, 1000) for _ in range(400)] for _ in range(3)]
    bodies = [
        {"input_ids": each, "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
        for each in ids
    ]
    with ServerProcess(tmp_path, *FLAGS) as one:
        expected = [httpx.post(one.url + "/generate", json=body, timeout=180).json() for body in bodies]
    with Pair(tmp_path, "--disaggregation-transfer-backend", transport) as pair:
        for body, single in zip(bodies, expected):
            got = pair.post("/generate", body).json()
            assert got["output_ids"] == single["output_ids"]
            assert got["meta_info"]["cached_tokens"] >= 398, pair.decode.log
        for server in (pair.prefill, pair.decode):
            server.wait_free()
            assert "repaired" not in server.log


@pytest.mark.exhaustive
def test_servers_with_other_transports_refuse_each_other(tmp_path: Path) -> None:
    ids = [random.randrange(20, 1000) for _ in range(100)]
    with Pair(tmp_path, decode=("--disaggregation-transfer-backend", "shm")) as pair:
        body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}
        assert len(pair.post("/generate", body).json()["output_ids"]) == 4
        assert "--disaggregation-transfer-backend: prefill server tcp, decode server shm" in pair.decode.log
