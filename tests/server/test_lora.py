"""LoRA adapters over HTTP: selection by requests, and loading and unloading under traffic."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from moe_engine.core.messages import AddRequest, RequestDelta
from moe_engine.core.rank_calls import RankAnswer
from moe_engine.frontend import read_ahead, served_adapters
from moe_engine.frontend.client_api import CallError, GroupAnswers
from moe_engine.types.step_settings import LoraAdapter, LoraSettings
from tests.server.fake_engine import FakeClient
from tests.server.harness import get, in_process, post

LORA = LoraSettings(
    4, 8, ("q_proj",), max_loaded=3, adapters=(LoraAdapter(1, "fr", "/a/fr"), LoraAdapter(2, "de", "/a/de", True))
)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "ids"),
    [
        ("/generate", {"text": "a"}, [0]),
        ("/generate", {"text": "a", "lora_path": "fr"}, [1]),
        ("/generate", {"text": ["a", "b", "c"], "lora_path": ["de", None, "fr"]}, [2, 0, 1]),
        ("/generate", {"text": ["a", "b"], "lora_path": "de"}, [2, 2]),
        ("/v1/completions", {"prompt": "a", "model": "tiny:fr"}, [1]),
        ("/v1/completions", {"prompt": "a", "model": "de"}, [2]),
        ("/v1/completions", {"prompt": ["a", "b"], "lora_path": ["fr", None]}, [1, 0]),
        ("/v1/completions", {"prompt": "a", "model": "another", "lora_path": "fr"}, [1]),
        ("/v1/chat/completions", {**CHAT, "model": "tiny:de"}, [2]),
        ("/v1/chat/completions", {**CHAT, "lora_path": "fr", "n": 2}, [1, 1]),
        ("/v1/responses", {"input": "hi", "model": "fr"}, [1]),
        ("/v1/responses", {"input": "hi", "lora_path": "de"}, [2]),
        ("/v1/messages", {**CHAT, "max_tokens": 4, "model": "fr"}, [1]),
    ],
)
def test_adapters_of_requests(path: str, body: dict[str, Any], ids: list[int]) -> None:
    client = FakeClient()
    response = post(client, path, body, lora=LORA)
    assert response.status_code == 200, response.text
    assert sorted(r.lora_id for r in client.requests) == sorted(ids)
    assert [r.lora_id for r in sorted(client.requests, key=lambda r: int(r.rid.rpartition("-")[2]))] == ids
    assert all(r.lora_pinned == (r.lora_id == 2) for r in client.requests)


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        ("/generate", {"text": "a", "lora_path": "it"}, "lora_path", "'it': no LoRA adapter of this name is loaded"),
        ("/v1/completions", {"prompt": "a", "model": "tiny:it"}, "model", "loaded: fr, de"),
        ("/v1/completions", {"prompt": "a", "model": "fr", "lora_path": "de"}, "lora_path", "give one of them"),
        ("/generate", {"text": ["a", "b"], "lora_path": ["fr"]}, "lora_path", "1 values for 2 prompts"),
        ("/v1/chat/completions", {**CHAT, "lora_path": ["fr"]}, "lora_path", "a list is for a batch"),
    ],
)
def test_wrong_adapters(path: str, body: dict[str, Any], field: str, words: str) -> None:
    client = FakeClient()
    response = post(client, path, body, lora=LORA)
    assert response.status_code == 400 and words in response.text, response.text
    assert client.requests == []


def test_adapters_are_listed() -> None:
    cards = get(FakeClient(), "/v1/models", lora=LORA).json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("tiny", "/models/tiny", None), ("fr", "/a/fr", "tiny"), ("de", "/a/de", "tiny"),
    ]  # fmt: skip
    assert get(FakeClient(), "/v1/models/fr", lora=LORA).json()["parent"] == "tiny"


class Ranks(FakeClient):
    """`called`: calls of ranks and schedulers, in order; `reading`: paths that rank 0 still reads ahead. Requests run
    until `may_answer` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[str, Any]] = []
        self.reading, self.read_ahead = set[str](), set[str]()
        self.may_answer = asyncio.Event()

    async def _deltas(self, request: AddRequest) -> AsyncIterator[RequestDelta]:
        await self.may_answer.wait()
        async for delta in super()._deltas(request):
            yield delta

    async def call(self, method: str, **args: Any) -> list[Any]:
        self.called.append((method, args.get("lora_id")))
        return [None]

    async def ask_ranks(self, method: str, args: Any = None, deadline: float = 1.0) -> list[GroupAnswers]:
        if method != "read_ahead":
            return await super().ask_ranks(method, args, deadline)
        self.read_ahead.add(args["path"])
        return [GroupAnswers(None, [RankAnswer(0, args["path"] in self.reading)])]

    async def collective_rpc(self, method: str, args: Any = None, deadline: float = 1.0) -> list[Any]:
        self.called.append((method, args["lora_id"]))
        return await super().collective_rpc(method, args, deadline)


async def test_loading_and_unloading_under_traffic() -> None:
    client = Ranks()
    async with in_process(client, lora=LORA) as http:

        async def change(verb: str, **body: Any) -> httpx.Response:
            return await http.post(f"/{verb}_lora_adapter", json=body)

        running = asyncio.create_task(http.post("/generate", json={"text": "a", "lora_path": "fr"}))
        while not client.requests:
            await asyncio.sleep(0)
        unloading = asyncio.create_task(change("unload", lora_name="fr"))
        while "fr" in [card["id"] for card in (await http.get("/v1/models")).json()["data"]]:
            await asyncio.sleep(0)
        refused = await http.post("/generate", json={"text": "a", "lora_path": "fr"})
        assert refused.status_code == 400 and "no LoRA adapter" in refused.text
        assert not unloading.done() and client.called == []  # a request still uses it
        client.may_answer.set()
        assert (await running).status_code == 200
        answer = await unloading
        assert answer.json() == {
            "success": True, "message": "adapter fr is unloaded", "loaded_adapters": {"de": "/a/de"},
        }  # fmt: skip
        assert client.called == [("retire_lora", 1), ("unload_lora", 1)]
        again = await change("load", lora_name="fr", lora_path="/b/fr")
        assert again.json()["loaded_adapters"] == {"de": "/a/de", "fr": "/b/fr"}
        assert client.called[2:] == [("load_lora", 3)]  # a new number: it shares no cache with the old adapter
        for body, words in (
            ({"lora_name": "de", "lora_path": "/x"}, "is loaded already"),
            ({"lora_name": "tiny", "lora_path": "/x"}, "a name of the base model"),
        ):
            wrong = await change("load", **body)
            assert wrong.status_code == 400 and words in wrong.json()["error_message"]
        await change("load", lora_name="it", lora_path="/x")
        full = await change("load", lora_name="es", lora_path="/x")
        assert full.status_code == 400 and "--max-loaded-loras" in full.json()["error_message"]
        unknown = await change("unload", lora_name="es")
        assert unknown.status_code == 400 and "no LoRA adapter" in unknown.json()["error_message"]


async def test_a_hanging_mount_delays_the_adapter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and other adapters continue: ranks read an adapter between steps, and load it only after its files are
    in their page caches. An adapter whose files are not read within the time limit is refused."""
    client = Ranks()
    client.may_answer.set()
    async with in_process(client, lora=LORA) as http:

        def load(name: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(
                http.post("/load_lora_adapter", json={"lora_name": name, "lora_path": "/" + name})
            )

        client.reading = {"/slow"}
        loading = load("slow")
        while "/slow" not in client.read_ahead:
            await asyncio.sleep(0)
        assert (await http.post("/generate", json={"text": "a", "lora_path": "fr"})).status_code == 200
        assert client.called == [] and not loading.done()
        client.reading = set()
        assert (await loading).status_code == 200 and client.called == [("load_lora", 3)]
        assert (await http.post("/unload_lora_adapter", json={"lora_name": "slow"})).status_code == 200
        client.reading = {"/slow"}
        monkeypatch.setattr(served_adapters, "LOAD_SECONDS", 0.05)
        refused = (await load("slow")).json()["error_message"]
        assert refused == "/slow: not read after 0 s on rank 0; check its file system"
        monkeypatch.setattr(served_adapters, "LOAD_SECONDS", 60.0)
        assert (await load("fast")).status_code == 200


async def test_a_fingerprint_that_hangs_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = threading.Event()
    monkeypatch.setattr(read_ahead, "fingerprint_of", lambda folder: str(mounted.wait(60)))
    with pytest.raises(CallError, match="/a: not read after 0 s; check its file system"):
        await read_ahead.read_fingerprint("/a", 0.05)
    mounted.set()
    assert await read_ahead.read_fingerprint("/a", 60) == "True"


def test_without_lora() -> None:
    answer = post(FakeClient(), "/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"})
    assert answer.status_code == 400 and "--enable-lora" in answer.json()["error_message"]
