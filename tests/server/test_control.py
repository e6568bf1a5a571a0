"""Health, keys, metrics, server info, tokenize, abort, unimplemented endpoints, and the request log."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import pickle
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_engine import __version__
from moe_engine.config.args import EngineArgs
from moe_engine.core.messages import Call, encode
from moe_engine.custom_logit_processor import CustomLogitProcessor, DisallowedTokensLogitsProcessor
from moe_engine.errors import ConfigError
from moe_engine.frontend.client_api import Health
from moe_engine.server import native_api
from moe_engine.server.endpoints import REFUSED_PATHS
from moe_engine.server.metrics import Metrics
from moe_engine.server.settings import load_sampling_defaults
from moe_engine.tokenizer.tool_calls.named import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from tests.server.fake_engine import FakeClient
from tests.server.harness import CHAT, TEXT, get, in_process, make_app, post, talk


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_health_reports_dead_stalled_and_idle_engines(path):
    client = FakeClient()
    assert (get(client, path).status_code, get(client, path).content) == (200, b"")
    good = client.board
    for board, word in (
        (replace(good, alive=False, dead="engine core (pid 4242) was killed by SIGKILL"), "pid 4242"),
        (replace(good, ready=False), "still starting"),
        (replace(good, last_step_age=400.0, num_running=1), "step 8 not finished for 400.0 s"),
        (replace(good, last_step_age=400.0, num_waiting=2), "stalled"),
        (replace(good, silence=400.0), "no heartbeat from the engine core for 400.0 s"),  # stopped while idle
    ):
        client.board = board
        response = get(client, path)
        assert response.status_code == 503
        assert word in response.json()["error"]["message"]
    client.board = replace(good, last_step_age=400.0)  # idle, not stalled
    assert get(client, path).status_code == 200
    client.board = replace(good, last_step_age=40.0, num_running=1)
    assert get(client, path).status_code == 200
    assert get(client, path, watchdog_timeout=30.0).status_code == 503
    assert client.requests == []


async def test_concurrent_probes_share_one_token():
    """The endpoint needs no key."""
    client = FakeClient()
    client.delay = 0.2
    async with in_process(client) as http:
        answers = await asyncio.gather(*(http.get("/health_generate") for _ in range(20)))
        assert len(client.requests) == 1
        again = await http.get("/health_generate")
        assert {answer.status_code for answer in (*answers, again)} == {200}
    assert len(client.requests) == 2


def test_health_generate():
    client = FakeClient()
    assert get(client, "/health_generate").status_code == 200
    assert client.requests[0].prompt_ids == [0]
    assert client.requests[0].rid.startswith("HEALTH_CHECK")
    client.mute = True
    response = get(client, "/health_generate", health_timeout=0.05)
    assert response.status_code == 503
    assert not client.running


def test_keys():
    def code(path, key=None, **settings):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return get(FakeClient(), path, headers=headers, **settings).status_code

    keys = {"api_key": "k", "admin_api_key": "a"}
    assert code("/v1/models", **keys) == 401
    assert code("/v1/models", "a", **keys) == 401
    assert code("/v1/models", "k", **keys) == 200
    assert code("/flush_cache", "k", **keys) == code("/reset_prefix_cache", "k", **keys) == 401
    assert code("/flush_cache", "a", **keys) == 200
    assert code("/flush_cache", "k", api_key="k") == 200
    assert code("/v1/models", admin_api_key="a") == 200
    for free in ("/health", "/ready", "/ping", "/health_generate"):
        assert code(free, **keys) == 200
    assert code("/metrics", enable_metrics=True, **keys) == 200
    for scheme, status in (
        ("bearer", 200),
        ("BEARER", 200),
        ("Bearer ", 200),
        ("Basic", 401),
        ("", 401),
        ("Bearerk", 401),
    ):
        headers = {"Authorization": f"{scheme} k"}
        assert get(FakeClient(), "/v1/models", headers=headers, **keys).status_code == status, scheme
    response = post(FakeClient(), "/v1/completions", {"prompt": "x"}, **keys)
    assert response.json()["error"]["code"] == "invalid_api_key"


async def test_metrics():
    client = FakeClient()
    client.board = replace(client.board, num_running=3, num_waiting=2, num_used_tokens=512)
    async with in_process(client, enable_metrics=True) as http:
        for _ in range(2):
            await http.post("/generate", json={"text": "Hello"})
        await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        page = (await http.get("/metrics")).text
    values: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith("sglang:") and not line.startswith("sglang:http_"):
            name, value = line.rsplit(" ", 1)
            assert 'model_name="tiny"' in name
            values.setdefault(name.split("{")[0], float(value))
    tokens = len(client.tokenizer.encode(TEXT, False)) + 1
    assert values["sglang:num_requests_total"] == 3
    assert values["sglang:prompt_tokens_total"] == 2 + 2 + 5
    assert values["sglang:generation_tokens_total"] == 3 * tokens
    assert values["sglang:cached_tokens_total"] == 6
    assert values["sglang:time_to_first_token_seconds_count"] == 3
    assert values["sglang:inter_token_latency_seconds_count"] == 3 * (tokens - 1)
    assert values["sglang:e2e_request_latency_seconds_count"] == 3
    assert values["sglang:num_running_reqs"] == 3
    assert values["sglang:num_waiting_timeouts_total"] == 3 and values["sglang:num_running_timeouts_total"] == 2
    assert values["sglang:num_retracted_reqs"] == 3 and values["sglang:num_retracted_requests_total"] == 5
    assert values["sglang:num_preemptions_total"] == 4 and values["sglang:num_decode_transfer_queue_reqs"] == 6
    assert values["sglang:num_transfer_failed_reqs_total"] == 7
    assert values["sglang:num_queue_reqs"] == 2
    assert values["sglang:token_usage"] == 0.5
    assert values["sglang:gen_throughput"] == 12.5
    assert values["sglang:cache_hit_rate"] == 0.25
    assert values["sglang:num_aborted_requests_total"] == 0
    assert not any(name.endswith("_created") for name in values)


async def test_metrics_of_the_process_the_version_and_http():
    async with in_process(FakeClient(), enable_metrics=True) as http:
        await http.post("/generate", json={"text": "Hello"})
        await http.post("/generate", json={"text": 5})
        await http.post("/generate", json={"text": "Hello", "stream": True})
        for path in ("/nowhere", "/also/nowhere", "/v1/models/a", "/v1/models/b"):
            await http.get(path)
        families = {f.name: f for f in text_string_to_metric_families((await http.get("/metrics")).text)}
    answers = {
        (s.labels["endpoint"], s.labels["method"], s.labels["status_code"]): s.value
        for s in families["sglang:http_responses"].samples
    }
    assert answers == {
        ("/generate", "POST", "200"): 2,
        ("/generate", "POST", "400"): 1,
        ("unknown", "unknown", "404"): 2,
        ("/v1/models/{model:path}", "GET", "404"): 2,
    }
    assert sum(s.value for s in families["sglang:http_requests"].samples) == 7
    (build,) = families["moe_engine_build_info"].samples
    assert build.name == "moe_engine_build_info" and build.labels["version"] == __version__
    assert {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"} <= families.keys()


def test_monotonic_sums_are_counters():
    client = FakeClient()
    eplb = {
        "rebalances": 2, "experts_received": 7, "pause_seconds": 0.5, "longest_pause": 0.3, "pause_share": 0.1,
        "after": 0.9,
    }  # fmt: skip

    async def session(http):
        pages = []
        for value in (2, 2, 5):
            client.state = {"eplb": {**eplb, "rebalances": value}}
            pages.append((await http.get("/metrics")).text)
        return pages

    for page, rebalances in zip(talk(client, session, enable_metrics=True), (2, 2, 5), strict=True):
        families = {f.name.removeprefix("sglang:"): f for f in text_string_to_metric_families(page)}
        for name, value in (("rebalances", rebalances), ("experts_received", 7), ("pause_seconds", 0.5)):
            family = families[f"eplb_{name}"]
            assert (family.type, [s.value for s in family.samples]) == ("counter", [value])
        assert families["eplb_longest_pause_seconds"].type == "gauge"


def test_several_schedulers_on_one_page():
    """Counts are summed, ratios are not."""
    client = FakeClient()
    client.state = [
        {"new_token_ratio": 0.5, "num_free": 10, "num_evictable": 5, "num_used": 1},
        {"new_token_ratio": 0.7, "num_free": 20, "num_evictable": 0, "num_used": 2},
    ]
    values = {}
    for line in get(client, "/metrics", enable_metrics=True).text.splitlines():
        if not line.startswith("#"):
            values[line.split("{")[0].removeprefix("sglang:")] = float(line.rsplit(" ", 1)[1])
    assert values["new_token_ratio"] == pytest.approx(0.6)
    assert (values["kv_available_tokens"], values["kv_evictable_tokens"], values["kv_used_tokens"]) == (30, 5, 3)


def test_speculation_metrics():
    """Counts of several ranks are summed; without speculation there are no such counts."""
    client = FakeClient()
    assert "spec_" not in get(client, "/metrics", enable_metrics=True).text
    ranks: list[dict[str, Any]] = [
        {"depth": 1, "following": True, "verify_total": 30, "proposed": [30, 10], "accepted": [20, 5]},
        {"depth": 2, "following": True, "verify_total": 10, "proposed": [10, 10], "accepted": [10, 5]},
    ]
    values = {}
    client.state = {"speculation": ranks[0]}
    assert "sglang:spec_accept_length{" in get(client, "/metrics", enable_metrics=True).text
    client.state = [{"speculation": rank} for rank in ranks]
    for line in get(client, "/metrics", enable_metrics=True).text.splitlines():
        if line.startswith("sglang:spec_"):
            name, value = line.rsplit(" ", 1)
            position = name.split('position="')[1][0] if "position=" in name else ""
            values[name.split("{")[0].removeprefix("sglang:spec_") + position] = float(value)
    assert values == {
        "accept_length": 2.0,  # 40 steps, 40 drafts accepted
        "accept_rate": pytest.approx(40 / 60),
        "num_steps": 2,
        "position_accept_rate1": 0.75,
        "position_accept_rate2": 0.5,
    }


def test_probes_and_unlogged_requests_do_not_count():
    async def session(http):
        await http.get("/health_generate")
        await http.post("/generate", json={"text": "x", "log_metrics": False})
        await http.post("/generate", json={"text": "x", "log_metrics": True})
        return (await http.get("/metrics")).text

    page = talk(FakeClient(), session, enable_metrics=True)
    assert [line.split()[-1] for line in page.splitlines() if line.startswith("sglang:num_requests_total")] == ["1.0"]
    assert post(FakeClient(), "/generate", {"text": "x", "log_metrics": 1}).status_code == 400


def test_metrics_off():
    response = get(FakeClient(), "/metrics")
    assert response.status_code == 404
    assert "--enable-metrics" in response.json()["error"]["message"]


def test_facts():
    client = FakeClient()
    info = get(client, "/get_server_info", server_args={"tp_size": 1, "api_key": "k", "x": float("inf")}).json()
    assert info["max_total_num_tokens"] == 1024
    assert (info["tp_size"], info["api_key"], info["x"]) == (1, "***", None)
    assert info["last_gen_throughput"] == info["internal_states"][0]["last_gen_throughput"] == 12.5
    bare = get(client, "/server_info").json()
    assert bare.keys() == info.keys() - {"tp_size", "api_key", "x"}
    assert EngineArgs.from_kwargs(**bare).given == {"max_running_requests"}  # facts are no flags, and are accepted
    model = get(client, "/get_model_info").json()
    assert (model["model_path"], model["is_generation"], model["weight_version"]) == ("/models/tiny", True, "default")
    assert get(client, "/v1/loads").json()["loads"][0]["num_running_reqs"] == 0


def test_weight_version_everywhere():
    named = {"weight_version": "2026-08-01"}
    answers = [
        post(FakeClient(), "/v1/chat/completions", {"model": "tiny", **CHAT}, **named).json()["metadata"],
        post(FakeClient(), "/v1/completions", {"model": "tiny", "prompt": "hi"}, **named).json()["metadata"],
        post(FakeClient(), "/generate", {"text": "hi"}, **named).json()["meta_info"],
        get(FakeClient(), "/model_info", **named).json(),
    ]
    assert [answer["weight_version"] for answer in answers] == ["2026-08-01"] * 4


def test_backends_and_graphs_in_force():
    """The worker's choices are reported, not the flags."""
    chosen = ("fa3", "deep_gemm", "triton", "torch", "flashinfer")
    backends = dict(zip(("attention", "experts", "linear", "ops", "sampling"), chosen))
    client = FakeClient(backends=backends, graph_bytes=3 << 29, weight_bytes=1 << 30)
    asked = dict.fromkeys(("attention_backend", "moe_runner_backend", "linear_backend", "sampling_backend"), "auto")
    info = get(client, "/server_info", server_args={**asked, "max_running_requests": 40}).json()
    shown = ("attention_backend", "moe_runner_backend", "linear_backend", "ops_backend", "sampling_backend")
    assert [info[name] for name in shown] == list(chosen)
    assert info["internal_states"][0]["memory_usage"] == {
        "weight": 1.0, "kvcache": 0.0, "graph": 1.5, "token_capacity": 1024,
    }  # fmt: skip
    assert "swa_token_capacity" not in info["internal_states"][0]["memory_usage"]
    windowed = get(FakeClient(num_window_slots=96), "/server_info").json()
    assert windowed["internal_states"][0]["memory_usage"]["swa_token_capacity"] == 96
    assert info["max_running_requests"] == 40  # of all attention groups, like the flag
    client.state = {"max_running_requests": 7, "num_running": 3}
    assert get(client, "/server_info", server_args={"max_running_requests": 40}).json()["max_running_requests"] == 7


def test_loads_of_one_rank():
    client = FakeClient()
    client.healths = lambda: [Health(True, True, 7, 0.0, 0.0, running, 2, 512) for running in (1, 4)]
    whole = get(client, "/v1/loads?include=core&format=json").json()
    assert [load["dp_rank"] for load in whole["loads"]] == [0, 1]
    assert whole["aggregate"] == {
        "total_running_reqs": 5,
        "total_waiting_reqs": 4,
        "total_reqs": 9,
        "total_used_tokens": 1024,
        "avg_token_usage": 0.5,
    }
    one = get(client, "/v1/loads?dp_rank=1").json()
    assert (one["dp_rank_count"], one["loads"], one["aggregate"]["total_reqs"]) == (1, whole["loads"][1:], 6)
    for query, message in (
        ("dp_rank=2", "dp_rank 2: this server has ranks 0 to 1"),
        ("dp_rank=-1", "dp_rank: expected an integer >= 0, got '-1'"),
        ("dp_rank=x", "dp_rank: expected an integer, got 'x'"),
        ("format=prometheus", "format: expected 'json', got 'prometheus'"),
        ("include=core,spec", "include: expected a string matching regex"),
    ):
        answer = get(client, f"/v1/loads?{query}")
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_lost_ranks_have_no_load():
    """A balancer would choose them: they have the fewest requests."""
    client, lost = FakeClient(), "engine core DP0 (pid 7) was killed by SIGKILL"
    client.healths = lambda: [Health(False, True, 7, 0.0, 0.0, 0, 0, 0, lost), Health(True, True, 7, 0.0, 0.0, 3, 2, 5)]
    whole = get(client, "/v1/loads").json()
    assert [load["dp_rank"] for load in whole["loads"]] == [1] and whole["aggregate"]["total_reqs"] == 5
    assert [load["dp_rank"] for load in get(client, "/get_load").json()] == [1]
    one = get(client, "/v1/loads?dp_rank=0")
    assert (one.status_code, one.json()["error"]["message"]) == (503, f"dp_rank 0: this rank is lost: {lost}")
    client.healths = lambda: [Health(False, True, 7, 0.0, 0.0, 0, 0, 0, lost)]
    assert get(client, "/v1/loads").json()["aggregate"]["avg_token_usage"] == 0


def test_counters_continue_after_a_lost_rank():
    client = FakeClient()
    metrics = Metrics("m", client.info, "1.0")

    def retracted(totals: dict[int, int]) -> float:
        states = [{"dp_rank": rank, "num_retractions_total": total} for rank, total in totals.items()]
        page = metrics.render(client, states).decode()
        (line,) = (line for line in page.splitlines() if line.startswith("sglang:num_retracted_requests_total{"))
        return float(line.split()[-1])

    found = [retracted(totals) for totals in ({0: 100, 1: 10}, {1: 12}, {1: 13}, {})]
    assert found == [110, 112, 113, 113]


def test_tokenize_and_back():
    client = FakeClient()
    got = post(client, "/tokenize", {"prompt": "Hello world"}).json()
    assert (got["tokens"][0], got["count"], got["max_model_len"]) == (0, 3, 256)
    back = post(client, "/v1/detokenize", {"tokens": got["tokens"]}).json()
    assert back == {"text": "Hello world", "prompt": "Hello world"}
    many = post(client, "/v1/tokenize", {"prompt": ["a", "b c"], "add_special_tokens": False}).json()
    assert many["count"] == [len(ids) for ids in many["tokens"]]
    assert post(client, "/detokenize", {"tokens": many["tokens"]}).json() == {"text": ["a", "b c"]}
    asked = CHAT | {"tools": [{"type": "function", "function": {"name": "now"}}]}
    post(client, "/v1/chat/completions", asked)
    assert post(client, "/tokenize", asked).json()["tokens"] == client.requests[-1].prompt_ids
    asked = {"prompt": ["Hello world", "b c"], "return_token_strs": True}
    named = post(client, "/tokenize", asked).json()
    for strings, ids in zip(named["token_strs"], named["tokens"], strict=True):
        assert strings and [client.tokenizer.token_id(token) for token in strings] == ids
    assert post(client, "/tokenize", {**asked, "prompt": "b c"}).json()["token_strs"] == named["token_strs"][1]
    chat = post(client, "/tokenize", CHAT).json()
    assert client.tokenizer.decode(chat["tokens"], False).endswith("<｜User｜>hi<｜Assistant｜>")
    assert post(client, "/tokenize", {}).status_code == 400
    assert post(client, "/detokenize", {"tokens": [10**9]}).status_code == 400
    assert post(client, "/detokenize", {"tokens": [5], "skip_special_tokens": "no"}).status_code == 400
    assert post(client, "/tokenize", {"prompt": "x"}, skip_tokenizer_init=True).status_code == 400


def test_facts_of_the_tokenizer():
    """vLLM's, which evaluation harnesses render and tokenize with. The template is the one in force."""
    client = FakeClient()
    found = get(client, "/tokenizer_info").json()
    assert {name: text for name, text in found.items() if name.endswith("_token")} == client.tokenizer.special_tokens
    assert found["chat_template"] == client.tokenizer.chat_template and found["model_max_length"] == 256
    chosen = get(client, "/tokenizer_info", chat_template="{{ messages[0].content }}").json()
    assert chosen["chat_template"] == "{{ messages[0].content }}"
    assert get(client, "/tokenizer_info", skip_tokenizer_init=True).status_code == 400


async def test_flush_and_abort():
    client = FakeClient()
    async with in_process(client) as http:
        for path in ("/flush_cache", "/reset_prefix_cache"):  # the second name is vLLM's
            assert (await http.post(path)).text.startswith("Cache flushed.")
        client.idle = False
        assert (await http.get("/flush_cache")).status_code == 400
        assert (await http.post("/abort_request", json={})).status_code == 400
        client.mute = True
        bodies = [{"text": "x", "rid": rid} for rid in ("abc", "abd", "b")]
        running = [asyncio.create_task(http.post("/generate", json=body)) for body in bodies]
        while len(client.requests) < 3:
            await asyncio.sleep(0.001)
        assert (await http.post("/abort_request", json={"rid": "ab"})).status_code == 200
        assert client.aborts == ["abc", "abd"]
        assert (await http.post("/abort_request", json={"abort_all": True})).status_code == 200
        assert client.aborts == ["abc", "abd", "abc", "abd", "b"]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def test_flush_waits_up_to_its_timeout(monkeypatch):
    monkeypatch.setattr(native_api, "FLUSH_POLL_SECONDS", 0.0)
    client, idle = FakeClient(), iter([False, False, False, True])

    async def call(method, **args):
        return [next(idle)]

    client.call = call
    assert post(client, "/flush_cache?timeout=0", b"").status_code == 400
    assert post(client, "/flush_cache?timeout=600", b"").status_code == 200
    assert next(idle, None) is None
    for wrong, words in (("-1", ">= 0.0"), ("nan", ">= 0.0"), ("soon", "number"), ("1e9", "<= 3600.0")):
        answer = post(client, f"/flush_cache?timeout={wrong}", b"")
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith("timeout: expected a number") and f"{words}, got {wrong!r}" in message


def test_endpoints_that_are_not_offered():
    for path, reason in REFUSED_PATHS.items():
        for response in (get(FakeClient(), path), post(FakeClient(), path, {})):
            error = response.json()["error"]
            if not path.startswith("/api/"):  # whose errors are texts
                assert error["type"] == ("api_error" if path.startswith("/v1/messages") else "NotImplementedError")
                error = error["message"]
            assert (response.status_code, error) == (501, f"{path}: not offered by moe-engine: {reason}")
            assert response.headers["x-should-retry"] == "false", "or OpenAI's client sends it three times"
    assert get(FakeClient(), "/nowhere").status_code == 404
    assert get(FakeClient(), "/generate").status_code == 405
    assert get(FakeClient(), "/v1/nowhere").json()["object"] == "error"
    assert get(FakeClient(), "/openapi.json").status_code == 200
    for flag, value in (("reasoning_parser", "granite_thinking_parser"), ("tool_call_parser", "step3")):
        with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} {value}"):
            make_app(FakeClient(), **{flag: value})


def test_parsers_as_endpoints():
    body: Any = {"text": "why</think>because", "reasoning_parser": "deepseek-r1"}
    got = post(FakeClient(), "/separate_reasoning", body).json()
    assert got == {"reasoning_text": "why", "text": "because"}
    text = f'ok {CALLS_BEGIN}{CALL_BEGIN}f{SEPARATOR}{{"a": 1}}{CALL_END}{CALLS_END}'
    body = {"text": text, "tools": [{"function": {"name": "f"}}], "tool_call_parser": "deepseekv31"}
    got = post(FakeClient(), "/parse_function_call", body).json()
    assert got == {"normal_text": "ok ", "calls": [{"tool_index": 0, "name": "f", "parameters": '{"a": 1}'}]}
    for name in ("trinity", "step3"):
        later = post(FakeClient(), "/parse_function_call", body | {"tool_call_parser": name})
        assert later.status_code == 400 and "not available yet" in later.json()["error"]["message"]
    response = post(FakeClient(), "/parse_function_call", body | {"tool_call_parser": "x"})
    assert "tool_call_parser: choose one of deepseekv3, deepseekv31" in response.json()["error"]["message"]


def test_cross_origin_and_head():
    origin = {"Origin": "http://other"}
    assert get(FakeClient(), "/v1/models", headers=origin, api_key="k").headers["access-control-allow-origin"] == "*"

    async def session(http):
        return await http.head("/health")

    assert talk(FakeClient(), session).status_code == 200


def test_sampling_defaults(tmp_path):
    assert load_sampling_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 0, "do_sample": true, "top_p": null}')
    assert load_sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": -1}
    for broken in ("[]", '{"temperature": -1}'):
        file.write_text(broken)
        with pytest.raises(ConfigError, match=r"generation_config\.json: .*--sampling-defaults openai"):
            load_sampling_defaults(tmp_path)


def test_ids_in_ids_out():
    out = post(FakeClient(), "/generate", {"input_ids": [5]}, skip_tokenizer_init=True).json()
    assert "text" not in out
    assert post(FakeClient(), "/v1/chat/completions", CHAT, skip_tokenizer_init=True).status_code == 400


def test_request_log(caplog):
    with caplog.at_level(logging.INFO, "moe_engine.server"):
        post(FakeClient(), "/generate", {"text": "Hello", "rid": "r1"}, log_requests=True, log_requests_level=2)
    lines = [r.getMessage() for r in caplog.records]
    received = ast.literal_eval(lines[0].removeprefix("Receive: "))
    assert received["rid"] == "r1" and received["prompt_tokens"] == 2 and received["text"] == "Hello"
    assert received["sampling_params"]["max_new_tokens"] == 128 and len(received["x_request_id"]) == 32
    assert lines[1].startswith("Finish:")
    assert TEXT in lines[1]


class Inline(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits


@pytest.mark.parametrize("level", [1, 2, 3])
def test_request_log_shortens_custom_processors(caplog, level):
    dill = pytest.importorskip("dill")
    by_value = json.dumps({"callable": dill.dumps(Inline, byref=False, recurse=True).hex()})
    texts = {
        DisallowedTokensLogitsProcessor.to_str(): "DisallowedTokensLogitsProcessor",
        by_value: "Inline",
        json.dumps({"callable": pickle.dumps(Inline, protocol=2).hex()}): "Inline",
        json.dumps({"callable": b"no pickle".hex() * 100}): "",
    }
    for text, name in texts.items():
        caplog.clear()
        body = {"text": "Hello", "custom_logit_processor": text}
        flags = {"log_requests": True, "log_requests_level": level, "enable_custom_logit_processor": True}
        with caplog.at_level(logging.INFO, "moe_engine.server"):
            assert post(FakeClient(), "/generate", body, **flags).status_code == 200
        line = caplog.records[0].getMessage()
        shown = f"{name} ({len(text)} characters)" if name else f"{len(text)} characters"
        assert f"'custom_logit_processor': '{shown}'" in line and json.loads(text)["callable"] not in line


def test_settings_beyond_64_bits_are_refused():
    """Larger values cannot be sent to a scheduler."""

    class Encoding(FakeClient):
        async def call(self, method: str, **args: Any) -> list[Any]:
            encode(Call(0, method, args))
            return [{"values": {}}]

    for body in ({"a": {"b": 2**70}}, {"max_running_requests": -(2**63) - 1}):
        answer = post(Encoding(), "/set_internal_state", {"server_args": body})
        assert answer.status_code == 400 and "server_args: a number is out of range" in answer.text
    assert post(Encoding(), "/set_internal_state", {"server_args": {"a": 1}}).status_code == 200
