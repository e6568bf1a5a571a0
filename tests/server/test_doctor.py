"""``/doctor``: samples of the schedulers, the diagnosis as JSON and as a page."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import replace

import httpx
import pytest

from moe_engine.server import doctor_api
from moe_engine.tuning.doctor.diagnosis import Cost
from tests.server.fake_engine import FakeClient
from tests.server.harness import get, make_app, real_server, talk
from tests.server.test_status_page import BROWSER, needs_browser

BUSY = {
    "num_running": 8, "num_waiting": 40, "token_usage": 0.3, "last_gen_throughput": 90.0, "is_cuda_graph": 0,
    "num_retractions_total": 0, "prompt_tokens_total": 1000, "cached_tokens_total": 0, "compilations_after_ready": 0,
}  # fmt: skip
PAGE = {"accept": "text/html,*/*"}


class Memory:
    """A fake ledger: costs of a launch."""

    def of(self, change, statistics):
        return Cost("+1.00 GB", 2**30)


def sampled(client, states, query="", **settings):
    """The result of /doctor after these samples, taken while requests run."""

    async def session(http: httpx.AsyncClient) -> httpx.Response:
        app = http._transport.app
        for state in states:
            client.state = state
            await app.state.history.sample(app.state.server)
        app.state.history.costs = Memory()
        return await http.get(f"/doctor{query}")

    return talk(client, session, **settings)


def busy_client():
    client = FakeClient()
    client.board = replace(client.board, num_running=8, num_waiting=40)
    return client


def test_rules_of_the_last_minutes():
    states = [{**BUSY, "num_retractions_total": n, "compilations_after_ready": n // 4} for n in range(6)]
    found = sampled(busy_client(), states).json()
    by_name = {finding["name"]: finding for finding in found["findings"]}
    assert set(by_name) == {"running_limit", "retractions", "jit_after_ready", "no_cuda_graph"}
    limit = by_name["running_limit"]  # the fake engine runs at most 8 requests
    assert (limit["flag"], limit["value"], limit["memory"]) == ("--max-running-requests", 24, "+1.00 GB")
    assert found["healthy"] is False and found["num_batches"] == 6
    assert "oom_prefill" in found["without_facts"] and "WARNING running_limit" in found["text"]


def test_nothing_to_say_when_idle():
    client = FakeClient()
    found = sampled(client, [BUSY | {"num_running": 0, "num_waiting": 0}] * 3).json()
    assert found["findings"] == [] and found["healthy"] and found["num_batches"] == 0


def test_an_idle_server_is_not_sampled():
    client, calls = FakeClient(), []
    asked = client.call

    async def call(method, **args):
        calls.append(method)
        return await asked(method, **args)

    client.call = call
    sampled(client, [BUSY] * 5)
    assert calls == ["internal_state"]  # once, for requests that ended before


def test_ranks_are_told_apart():
    client = busy_client()
    client.board = replace(client.board)
    ranks = [[{**BUSY, "num_running": 7}, {**BUSY, "num_running": 1}]] * 6
    found = sampled(client, ranks, server_args={"device": "cpu"}).json()
    (imbalance,) = (one for one in found["findings"] if one["name"] == "dp_imbalance")
    assert imbalance["evidence"].startswith("DP0 runs 1.8 times the mean") or "1.7" in imbalance["evidence"]
    assert "no_cuda_graph" not in {one["name"] for one in found["findings"]}


@pytest.mark.parametrize("minutes", ["0", "-1", "11", "x"])
def test_wrong_minutes(minutes):
    response = sampled(busy_client(), [], f"?minutes={minutes}")
    assert response.status_code == 400 and "minutes" in response.json()["error"]["message"]


async def test_old_samples_do_not_count(monkeypatch):
    client, clock = busy_client(), [1000.0]
    monkeypatch.setattr(doctor_api.time, "monotonic", lambda: clock[0])
    app = make_app(client)
    client.state = BUSY
    history, server = app.state.history, app.state.server
    counts = []
    for moment in (1000.0, 1200.0, 1400.0, 1700.0):
        clock[0] = moment
        for _ in range(5):
            await history.sample(server)
        counts.append(history.report(server, 5).num_batches)
    counts.append(len(history._events))
    server.bodies.close()
    assert counts == [5, 10, 10, 10, 15]


def test_page_and_key():
    def ask(headers):
        return get(FakeClient(), "/doctor", headers=headers, api_key="k")

    shown = ask(PAGE)
    assert shown.status_code == 200 and "default-src 'none'" in shown.headers["content-security-policy"]
    assert "findings" in shown.text and shown.headers["content-type"].startswith("text/html")
    assert ask({}).status_code == 401
    assert ask({"Authorization": "Bearer k"}).json()["findings"] == []
    assert "vary" in shown.headers


def test_a_limit_that_a_request_has_lowered():
    """Requests wait for the four rows that /set_internal_state left, not for memory."""
    states = [{**BUSY, "num_running": 4, "max_running_requests": 4}] * 6
    names = {finding["name"] for finding in sampled(busy_client(), states).json()["findings"]}
    assert "running_limit" in names and "too_conservative" not in names


def test_without_load_nothing_is_claimed():
    text = sampled(FakeClient(), []).json()["text"]
    assert text.endswith("0 samples, no rule recommends a change: there was no load")


@needs_browser
def test_the_page_in_a_browser(tmp_path, monkeypatch):
    """The page shows the findings of the server's samples."""
    report = doctor_api.History.report

    def sampled_report(self, state, minutes):
        for _ in range(6):
            self.take(state, [BUSY], time.monotonic())
        return report(self, state, minutes)

    monkeypatch.setattr(doctor_api.History, "report", sampled_report)
    browser = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    with real_server(FakeClient()) as url:
        command = [*browser, "--virtual-time-budget=12000", "--dump-dom", f"{url}/doctor"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        re.search(r">2 of \d+ evaluated rules recommend a change<", done.stdout)
        and "running_limit: token usage" in done.stdout
    )
    assert "<code>--max-running-requests 24</code>" in done.stdout and 'role="status"></p>' in done.stdout
