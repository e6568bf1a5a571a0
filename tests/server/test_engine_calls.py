"""Profiling and weight updates over HTTP, against scripted answers of the ranks."""

from __future__ import annotations

import asyncio
import base64
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import torch
from safetensors.torch import load_file, save

from moe_engine.core.rank_calls import RankAnswer
from moe_engine.errors import EngineDeadError
from moe_engine.frontend.client_api import GroupAnswers, Health
from moe_engine.frontend.frontend import Frontend
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.weights.served_weights import ServedWeights
from moe_engine.frontend.weights.weight_updates import WeightUpdates
from tests.server.fake_engine import FakeClient
from tests.server.harness import get, in_process, post, real_server, talk
from tests.waiting import until

CHECKED = {"host": "here", "needed": 100, "available": 1 << 40}
UPDATE = "/update_weights_from_disk"
NAMES = ("model_path", "weight_version")


class Ranks(FakeClient):
    """Two ranks. `failing`: error of rank 1 by method; `lost`: methods during which the engine's second half is
    lost."""

    def __init__(self, **failing: str) -> None:
        super().__init__()
        self.failing, self.lost = failing, set[str]()
        self.called: list[str] = []
        self.read_ahead: list[tuple[str, bool]] = []
        self.idle = True
        self.killed = ""
        self.weight: dict[str, Any] = {}
        self.files: list[dict[str, torch.Tensor]] = []

    async def ask_ranks(self, method: str, args: Any = None, deadline: float = 1.0) -> list[GroupAnswers]:
        if method == "read_ahead":
            self.read_ahead.append((args["path"], args["headers_only"]))
            return [GroupAnswers(None, [RankAnswer(rank, False) for rank in range(2)])]
        self.called.append(method)
        found = dict(args(None) if callable(args) else args or {})
        values = {
            "check_weights": CHECKED,
            "check_tensors": CHECKED,
            "check_received": CHECKED,
            "list_groups": {"world_size": 2, "groups": []},
            "group_state": {"busy": False, "error": ""},
            "leave_group": True,
            "release_memory": {"kv_cache": 100},
            "read_weight": self.weight,
            "start_profile": found.get("prefix"),
            "stop_profile": "a",
        }
        if method == "stage_tensors":
            self.files = [load_file(Path(path) / "model.safetensors") for path in found["paths"]]
        value: Any = values.get(method)
        second = RankAnswer(1, value, self.failing.get(method, ""))
        if method in self.lost:
            return [GroupAnswers(None, [RankAnswer(0, value)]), GroupAnswers(None, lost="rank 1 was killed")]
        return [GroupAnswers(None, [RankAnswer(0, value), second])]

    async def call(self, method: str, **args: Any) -> list[Any]:
        self.called.append(method)
        return [True] if method in ("is_idle", "flush_cache") else await super().call(method, **args)

    def stop_stalled(self, stall: Any) -> None:
        self.killed = stall(self.board)

    def health(self) -> Health:
        return self.board


def updated(client: Ranks, **fields: Any) -> tuple[httpx.Response, dict[str, Any]]:
    """The answer, and /model_info afterwards."""

    async def session(http: httpx.AsyncClient) -> Any:
        answer = await http.post(UPDATE, json={"model_path": "/new", **fields})
        info = (await http.get("/model_info")).json()
        flags = (await http.get("/server_info")).json()
        if answer.status_code == 200:
            assert [flags[name] for name in NAMES] == [info[name] for name in NAMES]
        return answer, info

    found: tuple[httpx.Response, dict[str, Any]] = talk(client, session)
    return found


def test_an_update_runs_on_all_ranks_in_order_and_renames_the_weights() -> None:
    client = Ranks()
    answer, info = updated(client, weight_version="7")
    expected = {"success": True, "message": "Succeeded to update model weights from /new.", "num_paused_requests": 0}
    assert (answer.status_code, answer.json()) == (200, expected)
    assert (info["model_path"], info["weight_version"]) == ("/new", "7")
    order = ["check_weights", "is_idle", "stage_weights", "flush_cache", "commit_weights"]
    assert client.called[: len(order)] == order and client.read_ahead == [("/new", True)]
    assert updated(Ranks())[1]["weight_version"] == "default", "as before without a name"


@pytest.mark.parametrize("method", ["check_weights", "stage_weights"])
def test_a_rank_that_cannot_prepare_leaves_the_old_weights(method: str) -> None:
    client = Ranks(**{method: "cannot be read"})
    answer, info = updated(client, weight_version="7")
    assert answer.status_code == 400 and not answer.json()["success"]
    assert f"{method}: rank 1: cannot be read" in answer.json()["message"]
    assert (info["model_path"], info["weight_version"]) == ("/models/tiny", "default")
    assert "commit_weights" not in client.called and not client.killed
    assert ("discard_weights" in client.called) == (method == "stage_weights")


@pytest.mark.parametrize("method", ["check_weights", "stage_weights", "commit_weights"])
def test_the_others_are_updated_when_a_scheduler_is_lost(method: str) -> None:
    """It serves nothing any more."""
    client = Ranks()
    client.lost.add(method)
    answer, info = updated(client, weight_version="7")
    assert answer.status_code == 200 and info["weight_version"] == "7"
    assert "discard_weights" not in client.called and not client.killed


def test_a_rank_that_cannot_commit_ends_the_engine() -> None:
    """The weights of this rank would differ from the others'."""
    client = Ranks(commit_weights="device error")
    answer, info = updated(client, weight_version="7")
    assert client.killed == "weight update: rank 1: device error"
    assert answer.status_code == 400 and info["weight_version"] == "default"


def test_too_little_memory_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKED, "available", (1 << 28) + 150)
    client = Ranks()
    answer, _ = updated(client)
    assert "staging the new weights of 2 ranks needs 0.00 GiB of host memory" in answer.json()["message"]
    assert client.called[0] == "check_weights" and "stage_weights" not in client.called


def test_new_requests_wait_running_ones_end_first_or_are_aborted() -> None:
    async def session(http: httpx.AsyncClient) -> list[Any]:
        def ask(text: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(http.post("/generate", json={"text": text}))

        running = ask("first")
        while not client.requests:
            await asyncio.sleep(0.01)
        update = asyncio.create_task(http.post(UPDATE, json={"model_path": "/new", "weight_version": "7"}))
        while "check_weights" not in client.called:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        second = await http.post(UPDATE, json={"model_path": "/other"})
        waiting = ask("second")
        return [second.json(), *(one.json() for one in await asyncio.gather(running, waiting, update))]

    client = Ranks()
    client.delay = 0.05
    second, first, late, update = talk(client, session)
    assert second["message"] == "another weight update is running"
    assert update == {**update, "success": True, "num_paused_requests": 1}
    assert (first["meta_info"]["weight_version"], late["meta_info"]["weight_version"]) == ("default", "7")
    assert first["meta_info"]["finish_reason"]["type"] == "stop"


Waiting = Callable[[int], None]
"""Waits until this number of requests waits for the update."""


@contextmanager
def update_in_progress() -> Iterator[tuple[httpx.Client, Ranks, Waiting, Callable[[], dict[str, Any]]]]:
    """A server whose ranks stage weights until the last value is called, which returns the update's answer."""
    go_on, made = threading.Event(), list[ServedWeights]()

    def make(*args: Any) -> ServedWeights:
        made.append(ServedWeights(*args))
        return made[-1]

    class Slow(Ranks):
        async def ask_ranks(self, method: str, args: Any = None, deadline: float = 1.0) -> list[GroupAnswers]:
            while method == "stage_weights" and not go_on.is_set():
                self.called.append(method)
                await asyncio.sleep(0.01)
            return await super().ask_ranks(method, args, deadline)

    client = Slow()
    with (
        patch("moe_engine.frontend.frontend.ServedWeights", make),
        real_server(client, enable_metrics=True) as url,
        httpx.Client(base_url=url) as http,
        ThreadPoolExecutor() as pool,
    ):
        update = pool.submit(httpx.post, url + UPDATE, json={"model_path": "/new"}, timeout=60)

        def waiting(count: int) -> None:
            until(lambda: made[0].num_waiting == count, "another number of requests waits")

        def finish() -> dict[str, Any]:
            go_on.set()
            return dict(update.result(60).json())

        try:
            until(lambda: "stage_weights" in client.called)
            yield http, client, waiting, finish
        finally:
            finish()


def aborted(http: httpx.Client) -> float:
    page = http.get("/metrics").text
    return sum(float(line.split()[-1]) for line in page.splitlines() if "num_aborted_requests_total{" in line)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"sampling_params": {"n": 2}}, {"text": ["a", "b"], "rid": ["x-1", "x-2"]}])
def test_an_abort_ends_a_request_that_waits_for_an_update(stream: bool, fields: dict[str, Any]) -> None:
    with update_in_progress() as (http, client, waiting, finish), ThreadPoolExecutor() as pool:
        body = {"text": "hi", "rid": "x", "stream": stream, **fields}
        ask = partial(httpx.post, f"{http.base_url}/generate", timeout=60)
        first, second = pool.submit(ask, json=body), pool.submit(ask, json={"text": "stays", "rid": "y"})
        waiting(2)
        http.post("/abort_request", json={"rid": "x"})
        answer = first.result(60)  # the update still runs
        assert answer.status_code == 200 and "Abort in /abort_request" in answer.text
        assert aborted(http) == (2 if fields else 1)
        again = pool.submit(ask, json={"text": "hi", "rid": "x"})
        waiting(2)
        assert not again.done() and not second.done() and not client.requests
        assert finish()["num_paused_requests"] == 2
        for done in (second.result(60), again.result(60)):
            assert done.json()["meta_info"]["finish_reason"]["type"] == "stop"
        assert http.get("/server_info").json()["internal_states"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_ends_a_request_that_waits_for_an_update(stream: bool) -> None:
    with update_in_progress() as (http, client, waiting, finish):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{http.base_url}/generate", json={"text": "hi", "rid": "x", "stream": stream}, timeout=1.0)
        waiting(0)
        assert finish()["num_paused_requests"] == 0
        assert not client.requests
        assert http.post("/generate", json={"text": "hi", "rid": "x"}).status_code == 200


@pytest.mark.parametrize("field", ["keep_pause", "flush_cache"])
def test_fields_that_would_mix_weights_are_refused(field: str) -> None:
    body = {"model_path": "/new", field: field == "keep_pause"}
    response = post(Ranks(), UPDATE, body)
    assert response.status_code == 400 and response.json()["error"]["param"] == field


def test_a_dead_engine_is_reported() -> None:
    class Dead(Ranks):
        async def ask_ranks(self, method: str, args: Any = None, deadline: float = 1.0) -> list[GroupAnswers]:
            self.fail()
            raise EngineDeadError("core was killed")

        def fail(self) -> None:
            import dataclasses

            self.board = dataclasses.replace(self.board, alive=False, dead="core was killed")

    assert post(Dead(), UPDATE, {"model_path": "/new"}).status_code == 503


def test_profiles_are_named_by_id_and_rank() -> None:
    client = Ranks()
    response = post(client, "/start_profile", {"output_dir": "/traces", "profile_id": "a", "num_steps": 3})
    assert (response.status_code, response.text) == (200, "Start profiling.\na\na\n")
    assert get(client, "/stop_profile").text == "Stop profiling.\na\na\n"
    assert client.called == ["start_profile", "stop_profile"]


def test_a_profile_starts_on_all_ranks_or_none() -> None:
    client = Ranks(start_profile="/traces: cannot be written")
    response = post(client, "/start_profile", {})
    assert response.status_code == 400
    assert "rank 1: /traces: cannot be written" in response.json()["error"]["message"]
    assert client.called == ["start_profile", "stop_profile"]


def test_a_trace_that_cannot_be_written_is_no_fault_of_the_client() -> None:
    answer = get(Ranks(stop_profile="/traces/a: cannot be written (No space left on device)"), "/stop_profile")
    assert answer.status_code == 500
    assert "rank 1: /traces/a: cannot be written (No space left on device)" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"start_step": 3}, {"profile_by_stage": True}, {"profile_id": "../x"}])
def test_profile_options_that_are_refused(body: dict[str, Any]) -> None:
    response = post(Ranks(), "/start_profile", body)
    assert response.status_code == 400 and next(iter(body)) in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (UPDATE, {"model_path": "/a\0b"}),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "\0"}),
        ("/start_profile", {"output_dir": "/a\0b"}),
        ("/start_profile", {"profile_prefix": "a\0"}),
    ],
)
def test_null_characters_in_paths(path: str, body: dict[str, Any]) -> None:
    client = Ranks()
    response = post(client, path, body)
    words = f"{list(body)[-1]}: expected a string without null characters"
    assert response.status_code == 400 and words in response.json()["error"]["message"] and client.called == []


def test_groups_of_trainers() -> None:
    """The calls on the ranks, and the state after a failure."""
    group = {"master_address": "127.0.0.1", "master_port": 29555, "rank_offset": 1, "world_size": 3}
    tensors = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]]}
    client = Ranks()
    assert post(client, "/init_weights_update_group", group).json() == {
        "success": True, "message": "Succeeded to initialize the weights update group weight_update_group.",
    }  # fmt: skip
    answer = post(client, "/update_weights_from_distributed", {**tensors, "weight_version": "7"})
    assert answer.json()["message"] == "Succeeded to update model weights from the group weight_update_group."
    assert post(client, "/destroy_weights_update_group", {}).json()["success"]
    order = "list_groups join_group group_state check_received receive_tensors group_state is_idle stage_received"
    assert client.called[:8] == order.split() and client.called[-2:] == ["commit_weights", "leave_group"]
    for method in ("check_received", "stage_received"):
        failing = Ranks(**{method: "out of order"})
        answer = post(failing, "/update_weights_from_distributed", tensors)
        assert answer.status_code == 400 and "was destroyed, init it again" in answer.json()["message"]
        assert failing.called[-1] == "leave_group" and "commit_weights" not in failing.called
    failing = Ranks(join_group="no")
    assert post(failing, "/init_weights_update_group", group).status_code == 400
    assert failing.called == ["list_groups", "join_group", "leave_group"]
    for wrong in ({"rank_offset": 0}, {"world_size": 2}, {"backend": "mpi"}, {"timeout": 0}):
        assert post(Ranks(), "/init_weights_update_group", {**group, **wrong}).status_code == 400, wrong


def test_requests_while_memory_is_released() -> None:
    client = Ranks()

    async def session(http: httpx.AsyncClient) -> None:
        released = (await http.post("/release_memory_occupation", json={"tags": ["kv_cache"]})).json()
        assert released["success"] and released["released"] == ["kv_cache"]
        refused = await http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and "/resume_memory_occupation" in refused.json()["error"]["message"]
        assert (await http.get("/health_generate")).status_code == 503
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/server_info")).json()["released_memory"] == ["kv_cache"]
        assert (await http.post("/resume_memory_occupation")).json()["released"] == []
        assert (await http.post("/generate", json={"text": "x"})).status_code == 200

    talk(client, session, enable_memory_saver=True)
    assert post(client, "/release_memory_occupation", {}).status_code == 400
    failing = Ranks(release_memory="no")
    answer = post(failing, "/release_memory_occupation", {}, enable_memory_saver=True)
    assert answer.status_code == 400 and answer.json()["released"] == [] and failing.called[-1] == "resume_memory"


def test_settings_change_on_all_schedulers_or_on_none() -> None:
    calls: list[dict[str, Any]] = []

    class Schedulers(Ranks):
        async def call(self, method: str, **args: Any) -> list[Any]:
            calls.append(args)
            if method == "settings":
                return [{"values": {"a": 1}, "bounds": {"a": [1, None]}}]
            refused = {"refused": "server_args.a: at most 3"}
            return [{"values": {"a": 2}}, refused if args["changes"] == {"a": 4} else {"values": {"a": 2}}]

    answer = post(Schedulers(), "/set_internal_state", {"server_args": {"a": 2}})
    assert answer.json() == {"updated": True, "server_args": {"a": 2}}
    assert calls == [{"changes": {"a": 2}, "check_only": check} for check in (True, False)]
    calls.clear()
    refused = post(Schedulers(), "/set_internal_state", {"server_args": {"a": 4}})
    assert refused.status_code == 400 and "server_args.a: at most 3" in refused.json()["error"]["message"]
    assert [call["check_only"] for call in calls] == [True]
    assert get(Schedulers(), "/get_internal_state").json() == [{"values": {"a": 1}, "bounds": {"a": [1, None]}}]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_pauses_reach_every_scheduler(mode: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Paused(Ranks):
        async def call(self, method: str, **args: Any) -> list[Any]:
            calls.append((method, args))
            return [None]

    client = Paused()
    async with in_process(client) as http:
        paused, resumed, again = [
            await http.post("/pause_generation", json={"mode": mode}),
            await http.post("/continue_generation", json={}),
            await http.post("/continue_generation"),
        ]
    assert paused.json() == {
        "status": "ok", "message": "Generation paused successfully.", "num_paused_requests": 0,
    }  # fmt: skip
    assert resumed.json() == {"status": "ok", "message": "Generation continued successfully."}
    assert again.json()["message"] == "Generation was not paused."
    assert calls == [("pause", {"retract": mode == "retract"}), ("resume", {}), ("resume", {})]


def test_a_pause_of_another_mode_is_refused() -> None:
    response = post(Ranks(), "/pause_generation", {"mode": "forever"})
    assert response.status_code == 400 and "mode" in response.json()["error"]["message"]


class Runs:
    """A class whose pickle runs code when it is loaded."""

    def __reduce__(self) -> Any:
        return (touched.append, (1,))


touched: list[int] = []


def test_tensors_arrive_as_they_were_sent() -> None:
    client = Ranks()
    tensors = {"a": torch.randn(3, 2).bfloat16(), "b": torch.randn(1 << 18)}
    body = {"serialized_named_tensors": [base64.b64encode(save(tensors)).decode()], "weight_version": "7"}

    async def session(http: httpx.AsyncClient) -> Any:
        done = await http.post("/update_weights_from_tensor", json=body)
        return done, (await http.get("/model_info")).json()

    done, info = talk(client, session)
    assert done.json() == {
        "success": True, "message": "Succeeded to update model weights from tensors.", "num_paused_requests": 0,
    }  # fmt: skip
    assert info["weight_version"] == "7" and info["model_path"] == client.info.model_path
    calls = ["check_tensors", "is_idle", "stage_tensors", "flush_cache", "commit_weights"]
    assert client.called == calls and len(client.files) == 1
    for name, tensor in tensors.items():
        assert torch.equal(client.files[0][name], tensor)


def sent(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([sent(pickle.dumps([("a", Runs())]))], "serialized_named_tensors[0]: a pickle, which is never loaded"),
        ([sent(bytes(ForkingPickler.dumps([("a", torch.zeros(2))])))], "a pickle, which is never loaded"),
        ([sent(save({"a": torch.zeros(2)})), "%%"], "serialized_named_tensors[1]: not base64"),
        ([sent(save({"a": torch.zeros(2)})[:-1])], "truncated"),
        ([sent(b"hello")], "serialized_named_tensors[0]: truncated or not a safetensors file"),
        ([], "serialized_named_tensors"),
    ],
)
def test_tensors_in_other_forms_are_refused(items: list[str], why: str) -> None:
    client = Ranks()
    response = post(client, "/update_weights_from_tensor", {"serialized_named_tensors": items})
    assert response.status_code == 400 and why in response.text, response.text
    assert not client.called and not touched


def test_a_format_of_tensors_that_is_not_known_is_refused() -> None:
    body = {"serialized_named_tensors": ["x"], "load_format": "flattened_bucket"}
    response = post(Ranks(), "/update_weights_from_tensor", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "load_format"


async def test_the_version_alone() -> None:
    client = Ranks()
    async with in_process(client) as http:
        done = await http.post("/update_weight_version", json={"new_version": "8"})
        info, answer = await http.get("/model_info"), await http.post("/generate", json={"text": "a"})
        for path in ("/get_weight_version", "/weight_version"):  # slime reads it
            assert (await http.get(path)).json() == {"weight_version": "8"}
        asked = {"restore_weights_before_load": True, "post_process_quantization": False}
        prepared = await http.post("/post_process_weights", json=asked)
        assert prepared.status_code == 200 and prepared.json()["success"]
        assert (await http.post("/post_process_weights", json={"post_process_quantization": 3})).status_code == 400
    assert done.json() == {"success": True, "message": "Weight version updated to 8", "new_version": "8"}
    assert info.json()["weight_version"] == answer.json()["meta_info"]["weight_version"] == "8" and not client.called


def test_a_weight_by_name() -> None:
    client = Ranks()
    numbers, values = torch.tensor([2, 0, 1, 3]), torch.tensor([0.5, 1.0, 2.0, float("nan")])
    client.weight = {"shape": [2, 2], "numbers": numbers.numpy().tobytes(), "values": values.numpy().tobytes()}
    for response in (
        get(client, "/get_weights_by_name?name=a&truncate_size=2"),
        post(client, "/get_weights_by_name", {"name": "a", "truncate_size": 2}),
    ):
        assert response.status_code == 200 and response.json() == [[1.0, 2.0], [0.5, None]]
    refused = post(client, "/get_weights_by_name", {})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "name"


def test_an_unknown_weight() -> None:
    client = Ranks(read_weight="'b' is no tensor of the served model; similar: a")
    response = get(client, "/get_weights_by_name?name=b")
    assert response.status_code == 400 and "similar: a" in response.json()["error"]["message"]


def test_keys() -> None:
    for path in (UPDATE, "/start_profile", "/stop_profile", "/pause_generation", "/continue_generation"):
        keys = {"api_key": "k", "admin_api_key": "a"}
        wrong = post(Ranks(), path, {"model_path": "/new"}, headers={"Authorization": "Bearer k"}, **keys)
        right = post(Ranks(), path, {"model_path": "/new"}, headers={"Authorization": "Bearer a"}, **keys)
        assert (wrong.status_code, right.status_code) == (401, 200), path


async def test_an_update_is_given_up_if_requests_do_not_end() -> None:
    client = Ranks()
    client.mute = True
    frontend = Frontend(client, client.tokenizer)
    endless = asyncio.create_task(frontend.generate(GenerateInput(text="endless")))
    while not client.requests:
        await asyncio.sleep(0.01)
    found = await WeightUpdates(frontend, drain_seconds=0.2).update("/new", version="7")
    assert not found.success and "requests still run after 0.2 s" in found.message
    assert client.called == ["check_weights"] and frontend.weights.version == "default"
    client.mute = False
    answer: Any = await asyncio.wait_for(frontend.generate(GenerateInput(text="next")), 60)
    assert answer["meta_info"]["weight_version"] == "default"
    endless.cancel()


async def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    client = Ranks()
    frontend = Frontend(client, client.tokenizer)
    async with frontend.weights.exclusive(1.0, lambda: None):
        waiting = asyncio.create_task(frontend.generate(GenerateInput(text="hi", rid="r")))
        while not frontend.weights.num_waiting:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert (frontend.weights.num_waiting, len(frontend._live)) == (0, 0)
    async with frontend.weights.exclusive(1.0, lambda: None) as running:
        assert running == 0
