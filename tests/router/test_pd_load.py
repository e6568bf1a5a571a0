"""sglang-router in PD mode under load: 2 prefill and 2 decode servers, one of each killed, another one added."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.disaggregation.pair import Pair
from tests.router.router_process import RouterProcess, needs_router
from tests.waiting import until

pytestmark = [
    needs_router, pytest.mark.usefixtures("forked_processes"), pytest.mark.exhaustive, pytest.mark.timeout(300)
]  # fmt: skip


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_server_is_killed_and_another_one_added_under_load(victim: str, tmp_path: Path) -> None:
    """Only requests of the lost server have errors; later all requests are answered again."""
    stop, codes = threading.Event(), []
    with ExitStack() as stack:
        made = [Pair(tmp_path) for _ in range(2)]
        pairs = [stack.enter_context(pair) for pair in made]
        flags = ["--pd-disaggregation", "--policy", "round_robin"]
        for pair in pairs:
            flags += ["--prefill", pair.prefill.url, str(pair.port), "--decode", pair.decode.url]
        router = stack.enter_context(RouterProcess(tmp_path, [], *flags))

        def load(seed: int) -> None:
            rng = random.Random(seed)
            with router.client() as client:
                while not stop.is_set():
                    ids = [rng.randrange(20, 1000) for _ in range(120)]
                    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 6}}
                    codes.append(client.post("/generate", json=body).status_code)

        threads = [threading.Thread(target=load, args=(random.getrandbits(30),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: codes.count(200) > 20)
            assert set(codes) == {200}
            lost = pairs[0].prefill if victim == "prefill" else pairs[0].decode
            for process in [*lost.children(), lost.process]:
                process.kill()
            router.wait_healthy(3)
            before = codes.count(200)
            until(lambda: codes.count(200) > before + 20)
            more = stack.enter_context(Pair(tmp_path))
            added = more.prefill if victim == "prefill" else more.decode
            body = {"url": added.url, "worker_type": victim}
            if victim == "prefill":
                body["bootstrap_port"] = more.port  # type: ignore[assignment]
            with router.client() as client:
                assert client.post("/workers", json=body).status_code in (200, 202)
            router.wait_healthy(4)
            until(lambda: "POST /generate" in added.log)
            good, bad = codes.count(200), len(codes) - codes.count(200)
            until(lambda: codes.count(200) > good + 20)
            assert len(codes) - codes.count(200) == bad, "a request failed although nothing was lost"
            assert bad < 30
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        for server in (pairs[1].prefill, pairs[1].decode, added):
            server.wait_free()
            assert "repaired" not in server.log
