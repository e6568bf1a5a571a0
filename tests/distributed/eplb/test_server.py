"""The expert endpoints: SGLang's responses, access keys, and errors without a recorder."""

from __future__ import annotations

import dataclasses
from typing import Any

import httpx
import pytest

from moe_engine.core.rank_calls import RankAnswer
from moe_engine.errors import EngineDeadError
from moe_engine.frontend.client_api import CallError, GroupAnswers
from tests.server.fake_engine import FakeClient
from tests.server.harness import get, post, talk

DEAD = "engine core DP1 (pid 4242) was killed by SIGKILL"

SAYS = {
    "start": "Start recording expert distribution.\n",
    "stop": "Stop recording expert distribution.\n",
    "dump": "Dump expert distribution record.\n",
}
VIEW = {
    "layers": 2,
    "experts": 2,
    "counts": [[0, 0], [3, 1]],
    "balancedness": {"current": 0.5},
    "recording": True,
    "pass": 4,
}
OTHER = {**VIEW, "counts": [[0, 0], [1, 1]], "pass": 5, "balancedness": {}}


def group(value: Any, rank: int = 0, replica: int | None = None) -> GroupAnswers:
    return GroupAnswers(replica, [RankAnswer(rank, value)])


class RecordingClient(FakeClient):
    """Two replicas of one rank each, with predefined values of expert calls by rank."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self.values: dict[str, list[Any]] = {
            "start_experts": [True, True],
            "stop_experts": [True, True],
            "dump_experts": [{"rank": 0, "pass_ids": [4, 5], "counts": b""}, {"rank": 0, "pass_ids": [1, 2]}],
            "view_experts": [VIEW, OTHER],
            **values,
        }
        self.called: list[str] = []
        self.arguments: dict[str, Any] = {}
        self.write_error = ""

    def healths(self) -> list[Any]:
        return [self.board, self.board]

    async def ask_ranks(self, method: str, args: Any = None, deadline: float = 1.0) -> list[GroupAnswers]:
        self.called.append(method)
        return [group(value, 0, replica) for replica, value in enumerate(self.values[method])]

    async def call_one(self, method: str, **args: Any) -> Any:
        self.called.append(method)
        self.arguments = args
        if self.write_error:
            raise CallError(self.write_error)
        return ["/there/a.pt"]


@pytest.mark.parametrize("verb", SAYS)
def test_sglangs_answers(verb: str) -> None:
    client = RecordingClient()
    path = f"/{verb}_expert_distribution_record"
    for response in (post(client, path, b""), get(client, path), post(client, path, {"path": "/etc/passwd"})):
        assert (response.status_code, response.text) == (200, SAYS[verb])
        assert response.headers["content-type"].startswith("text/plain")
    called = [f"{verb}_experts", *(["write_experts"] if verb == "dump" else [])]
    assert client.called == called * 3
    if verb == "dump":  # of all schedulers, with their newest passes merged
        assert [part["pass_ids"] for part in client.arguments["parts"]] == [[4, 5], [4, 5]]


@pytest.mark.parametrize("verb", SAYS)
def test_recording_off(verb: str) -> None:
    client = RecordingClient(**{f"{verb}_experts": [None if verb == "dump" else False]})
    response = post(client, f"/{verb}_expert_distribution_record", b"")
    assert response.status_code == 400
    assert "--expert-distribution-recorder-mode stat" in response.json()["error"]["message"]


def test_a_dump_that_cannot_be_written_is_a_server_error() -> None:
    client = RecordingClient()
    client.write_error = "/there/x.pt: cannot be written (No space left on device)"
    response = post(client, "/dump_expert_distribution_record", b"")
    assert response.status_code == 500 and "No space left" in response.json()["error"]["message"]


def dumps(client: RecordingClient, count: int) -> list[httpx.Response]:
    """Consecutive dumps of one server."""

    async def session(http: httpx.AsyncClient) -> list[httpx.Response]:
        return [await http.post("/dump_expert_distribution_record") for _ in range(count)]

    found: list[httpx.Response] = talk(client, session)
    return found


def part(number: int) -> dict[str, Any]:
    return {"rank": 0, "pass_ids": [number], "counts": b""}


def test_a_core_that_dies_between_take_and_write_loses_nothing() -> None:
    """The parts of the dead core have already arrived, and another core writes them."""

    class Dying(RecordingClient):
        async def call_one(self, method: str, **args: Any) -> Any:
            if self.called.count("write_experts") == 0:
                await super().call_one(method, **args)
                raise EngineDeadError(DEAD)
            return await super().call_one(method, **args)

    client = Dying(dump_experts=[part(4), part(7)])
    (response,) = dumps(client, 1)
    assert (response.status_code, response.text) == (200, SAYS["dump"])
    assert client.called == ["dump_experts", "write_experts", "write_experts"]
    assert client.arguments["parts"] == [part(7), part(7)]


def test_a_dump_without_a_writer_is_reported() -> None:
    class Dead(RecordingClient):
        async def call_one(self, method: str, **args: Any) -> Any:
            raise EngineDeadError(DEAD)

    (response,) = dumps(Dead(), 1)
    assert response.status_code == 503
    assert response.json()["error"]["message"].endswith(
        f"{DEAD}; the dump was not written, and the recorded counts are lost"
    )


def test_unwritten_counts_are_in_the_next_dump_until_recording_restarts() -> None:
    client = RecordingClient(dump_experts=[part(4)])
    client.write_error = "no room"
    assert [response.status_code for response in dumps(client, 2)] == [500, 500]
    assert client.arguments["parts"] == [part(4), part(4)]

    async def restart(http: httpx.AsyncClient) -> None:
        for verb in ("dump", "start", "dump"):
            await http.post(f"/{verb}_expert_distribution_record")

    talk(client, restart)
    assert client.arguments["parts"] == [part(4)]


def test_a_dump_reports_missing_parts_once() -> None:
    """A replica died before its answer."""

    class Losing(RecordingClient):
        async def ask_ranks(self, method: str, args: Any = None, deadline: float = 1.0) -> list[GroupAnswers]:
            self.lost = [dataclasses.replace(self.board, alive=False, dead=DEAD)]
            return [group(part(4), 0, 0), GroupAnswers(1, lost=DEAD)]

        def healths(self) -> list[Any]:
            return [self.board, *getattr(self, "lost", [])]

    client = Losing()
    first, second = dumps(client, 2)
    assert first.status_code == 200
    assert first.text == f"{SAYS['dump']}Without the records of what was lost: {DEAD}\n"
    assert DEAD not in second.text and client.arguments["parts"] == [part(4)]


def test_a_rank_that_fails_is_named() -> None:
    class Failing(RecordingClient):
        async def ask_ranks(self, method: str, args: Any = None, deadline: float = 1.0) -> list[GroupAnswers]:
            answers = [RankAnswer(0), RankAnswer(3, error="no answer within 60 s")]
            return [group(None, 0, 0), GroupAnswers(1, answers)]

    for verb in ("start", "dump"):
        response = post(Failing(), f"/{verb}_expert_distribution_record", b"")
        assert response.status_code == 500
        assert "replica 1 rank 3: no answer within 60 s" in response.json()["error"]["message"]


def test_the_live_page_and_its_data() -> None:
    client = RecordingClient()
    page = get(client, "/experts")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"] and "experts/data" in page.text
    data = get(client, "/experts/data", served_model_name="m").json()
    launch = data.pop("launch")
    assert launch["ranks"] == 1 and launch["model"] == client.info.served_model_name and launch["mode"] is None
    assert data == {**VIEW, "counts": [[0, 0], [4, 2]], "pass": 5}
    off = get(RecordingClient(view_experts=[None]), "/experts/data").json()
    assert off["layers"] == 0 and off["counts"] == [] and off["recording"] is False


def test_the_gain_of_eplb() -> None:
    """Expert 0 of four gets half the tokens: on two ranks EPLB pairs it with the least loaded expert, and reports the
    gain."""
    view = {**VIEW, "experts": 4, "counts": [[0] * 4, [50, 30, 15, 5]]}
    answer = get(RecordingClient(view_experts=[view]), "/experts/gain", ep_size=2, tp_size=2)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["ranks"] == [80, 20] and sorted(found["planned"]) == [45, 55]
    first = found["rows"][0]
    assert (first["ep_size"], first["redundant_experts"], first["is_launch"]) == (2, 0, True)
    assert first["trivial"] == pytest.approx(50 / 80, abs=1e-3) and first["eplb"] == pytest.approx(50 / 55, abs=1e-3)
    assert first["slowest_rank"] == pytest.approx(55 / 80, abs=1e-3)
    one = get(RecordingClient(view_experts=[view]), "/experts/gain").json()
    assert one["ranks"] == one["planned"] == [] and not any(row["is_launch"] for row in one["rows"])
    assert get(RecordingClient(view_experts=[None]), "/experts/gain").json()["rows"] == []


def test_keys() -> None:
    """The page needs no key and prompts for it; its data needs the API key, recording the admin key."""
    client = RecordingClient()

    def ask(path: str, key: str | None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else None
        return get(client, path, headers=headers, api_key="k", admin_api_key="a")

    assert ask("/experts", None).status_code == 200
    assert ask("/experts/data", None).status_code == 401
    assert ask("/experts/data", "k").status_code == 200
    for verb in SAYS:
        path = f"/{verb}_expert_distribution_record"
        assert ask(path, "k").status_code == 401 and ask(path, "a").status_code == 200


def test_metrics() -> None:
    client = RecordingClient()
    stats = {"rebalances": 2, "experts_received": 30, "pause_seconds": 0.25, "longest_pause": 0.01, "pause_share": 0.03}
    client.state = {"balancedness": {"current": 0.9, "10": 0.8}, "eplb": {**stats, "after": 0.97, "before": 0.5}}
    page = get(client, "/metrics", enable_metrics=True).text
    found = {
        line.split("{")[0].removeprefix("sglang:eplb_"): float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith("sglang:eplb_") and "window" not in line
    }
    assert found == {
        "rebalances_total": 2,
        "experts_received_total": 30,
        "pause_seconds_total": 0.25,
        "longest_pause_seconds": 0.01,
        "pause_share": 0.03,
        "planned_balancedness": 0.97,
    }
    windows = {
        line.split('window="')[1].split('"')[0]: float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith("sglang:eplb_balancedness{")
    }
    assert windows == {"current": 0.9, "10": 0.8}
    assert "eplb" not in get(RecordingClient(), "/metrics", enable_metrics=True).text
