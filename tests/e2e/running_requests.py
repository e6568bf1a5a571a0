"""Requests that run while a test kills, stops or ends the processes of their server."""

from __future__ import annotations

import threading

from tests.e2e.server_process import ServerProcess
from tests.waiting import until

LENGTH = 2000  # a second or more of a tiny model
ENDLESS = 8000  # of a request that the test interrupts; the checkpoint's context is a little longer
LONG = {"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True}


def in_background(
    server: ServerProcess, count: int, length: int = LENGTH, batch: int | None = None
) -> tuple[list[threading.Thread], list[object]]:
    """`count` clients with a request each. `batch`: number of prompts of each request, which begin together."""
    answers: list[object] = []

    def ask(i: int) -> None:
        with server.client() as client:
            sampling = LONG | {"max_new_tokens": length}
            text = f"hello {i}" if batch is None else [f"hello {i} {j}" for j in range(batch)]
            answers.append(client.post("/generate", json={"text": text, "sampling_params": sampling}))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads, answers


def wait_running(server: ServerProcess, count: int) -> None:
    until(lambda: server.state()["num_running"] >= count, "the requests do not run")
