"""Request ids, Retry-After, HTTPS, prefixes of proxies, and buckets of metrics."""

from __future__ import annotations

import logging
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.config.server import ServerArgs
from moe_engine.errors import ConfigError
from moe_engine.planning.flags.validate import check
from moe_engine.server.tls import Certificate
from tests.server.fake_engine import FakeClient
from tests.server.harness import CHAT, get, post, real_server, talk

ID = "x-request-id"


def test_every_response_has_the_id_of_its_request():
    async def session(http: httpx.AsyncClient) -> None:
        for method, path, body in (
            ("GET", "/health", None), ("GET", "/nowhere", None), ("DELETE", "/generate", None),
            ("POST", "/v1/chat/completions", {**CHAT, "stream": True}), ("POST", "/generate", {"text": 5}),
        ):  # fmt: skip
            given = await http.request(method, path, json=body, headers={ID: "trace-1/a"})
            assert given.headers[ID] == "trace-1/a", path
            own = [(await http.request(method, path, json=body)).headers[ID] for _ in range(2)]
            assert len(set(own)) == 2 and all(len(value) == 32 for value in own)
        for wrong in (b"", b"a b", b"x" * 129, b"\xe4"):
            found = await http.get("/health", headers=[(ID.encode(), wrong)])
            assert len(found.headers[ID]) == 32

    talk(FakeClient(), session)
    assert get(FakeClient(), "/v1/models", api_key="k").headers[ID]  # 401


def test_responses_with_simulated_acceptance_say_so():
    flags = {"speculative_algorithm": "NGRAM", "speculative_simulated_accept_length": 2.5}
    mark = "x-simulated-accept-length"
    assert post(FakeClient(), "/v1/chat/completions", CHAT, **flags).headers[mark] == "2.5"
    assert mark not in get(FakeClient(), "/health").headers


def test_the_request_log_has_the_id(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "moe_engine.server"):
        post(FakeClient(), "/generate", {"text": "a"}, headers={ID: "trace-2"}, log_requests=True)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Receive")]
    assert "'x_request_id': 'trace-2'" in line


def test_times_of_a_request(caplog: pytest.LogCaptureFixture):
    """The times in the log line and `meta_info` are equal; the client's clock bounds them."""
    client = FakeClient()
    client.delay = 0.01
    before = time.time()
    with caplog.at_level(logging.INFO, "moe_engine.server"):
        answer = post(client, "/generate", {"text": "a b"}, enable_request_time_stats_logging=True).json()
    meta, after = answer["meta_info"], time.time()
    (line,) = [record.getMessage() for record in caplog.records if "Req Time Stats" in record.getMessage()]
    assert f"rid={meta['id']}" in line
    facts = dict(word.split("=") for word in line.partition("): ")[2].split(", "))
    assert (int(facts["input_len"]), int(facts["output_len"])) == (meta["prompt_tokens"], meta["completion_tokens"])
    times = {name: float(value.removesuffix("ms")) / 1000 for name, value in facts.items() if value.endswith("ms")}
    assert times["queue_duration"] == meta["queue_time"] == 0.25
    assert times["e2e_latency"] == pytest.approx(meta["e2e_latency"], abs=1e-4)
    assert times["time_to_first_token"] == pytest.approx(meta["first_token_latency"], abs=1e-4)
    whole = times["time_to_first_token"] + times["decode_duration"]
    assert whole == pytest.approx(meta["e2e_latency"], abs=1e-3)
    later = meta["completion_tokens"] - 1
    assert times["decode_duration"] == pytest.approx(later / meta["decode_throughput"], abs=1e-4)
    assert times["inter_token_latency"] == pytest.approx(1 / meta["decode_throughput"], abs=1e-4)
    order = ("request_received_ts", "forward_entry_time", "prefill_finished_time", "request_finished_ts")
    found = [meta[name] for name in order]
    assert found == sorted(found) and before - 0.01 < found[0] and found[-1] < after + 0.01


def test_advice_to_retry():
    client = FakeClient()
    client.refuse = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    page = {"origin": "http://page", "x-api-key": "k"}
    response = post(client, "/generate", {"text": "a"}, headers=page, api_key="k")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "retry-after" in response.headers["access-control-expose-headers"]  # for programs in a browser
    assert "retry-after" not in post(FakeClient(), "/generate", {"text": 5}).headers


def test_paths_behind_a_proxy():
    """With the prefix and without it; endpoints with the prefix also need the key."""
    keys = {"api_key": "k", "admin_api_key": "a"}

    async def session(http: httpx.AsyncClient) -> None:
        for path in ("/engine/health", "/health"):
            assert (await http.get(path)).status_code == 200
        assert (await http.get("/engine/v1/models")).status_code == 401
        user, admin = {"Authorization": "Bearer k"}, {"Authorization": "Bearer a"}
        assert (await http.get("/engine/v1/models", headers=user)).status_code == 200
        assert (await http.post("/engine/flush_cache", headers=user)).status_code == 401
        assert (await http.post("/engine/flush_cache", headers=admin)).status_code == 200
        assert (await http.get("/engines/health", headers=user)).status_code == 404
        assert (await http.get("/openapi.json")).json()["servers"] == [{"url": "/engine"}]

    talk(FakeClient(), session, fastapi_root_path="/engine", **keys)
    assert "servers" not in get(FakeClient(), "/openapi.json").json()


def test_slashes_at_the_end_of_a_path():
    """Clients that append one need no redirect, and no key less."""

    async def session(http: httpx.AsyncClient) -> None:
        key = {"Authorization": "Bearer k"}
        assert (await http.get("/health/")).status_code == 200
        assert (await http.get("/v1/models/", headers=key)).json()["object"] == "list"
        assert (await http.post("/v1/completions//", headers=key, json={"prompt": "hi"})).status_code == 200
        for path in ("/flush_cache/", "/flush_cache//"):
            assert (await http.post(path, headers=key)).status_code == 401
        assert [(await http.get(path)).status_code for path in ("/v1/models/", "//")] == [401, 200]

    talk(FakeClient(), session, api_key="k", admin_api_key="a")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return str(cert), str(key)


@pytest.mark.parametrize("password", [None, "s3cret"])
def test_https(certificate: tuple[str, str], password: str | None, tmp_path: Path):
    import ssl

    cert, key = certificate
    if password is not None:
        encrypted = str(tmp_path / "encrypted.pem")
        command = ["openssl", "pkcs8", "-topk8", "-in", key, "-out", encrypted, "-passout", f"pass:{password}"]
        subprocess.run(command, check=True, capture_output=True)
        for wrong in (None, "guess"):
            with pytest.raises(ConfigError, match="password"):
                Certificate(cert, encrypted, wrong).check()
        key = encrypted
    made = Certificate(cert, key, password)
    made.check()
    with real_server(FakeClient(), certificate=made) as url:
        trusting = ssl.create_default_context(cafile=cert)
        assert httpx.post(url + "/v1/chat/completions", json=CHAT, verify=trusting).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/health")


def test_wrong_certificates(certificate: tuple[str, str], tmp_path: Path):
    cert, key = certificate
    with pytest.raises(ConfigError, match="No such file"):
        Certificate(str(tmp_path / "none.pem"), key).check()
    with pytest.raises(ConfigError, match="not a certificate in PEM"):
        Certificate(key, cert).check()
    assert Certificate.of(ServerArgs()) is None
    secret = {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_keyfile_password": "s3cret"}
    assert "s3cret" not in get(FakeClient(), "/server_info", server_args=secret).text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"ssl_certfile": "a.pem"}, "--ssl-keyfile belong together"),
        ({"ssl_keyfile": "a.pem"}, "--ssl-certfile and"),
        ({"fastapi_root_path": "engine"}, "--fastapi-root-path engine: must begin with /"),
        ({"fastapi_root_path": "/engine/"}, "not end with it"),
        ({"bucket_time_to_first_token": "1 x"}, "--bucket-time-to-first-token 1 x: must be numbers"),
        ({"bucket_inter_token_latency": "2 1"}, "rising numbers"),
        ({"bucket_e2e_request_latency": "0 1"}, "above 0"),
        ({"bucket_e2e_request_latency": "1 nan"}, "rising"),
        ({"bucket_e2e_request_latency": ""}, "rising"),
        ({"prompt_tokens_buckets": "linear 1 2"}, "--prompt-tokens-buckets linear 1 2: not a rule"),
        ({"prompt_tokens_buckets": "custom 2 2"}, "rising numbers above 0"),
        ({"prompt_tokens_buckets": "custom 1 x"}, "custom takes numbers"),
        ({"generation_tokens_buckets": "tse 5 1 4"}, "a base above 1"),
        ({"generation_tokens_buckets": "tse 5 2"}, "a middle above 0"),
        ({"generation_tokens_buckets": "tse 5 2 inf"}, "finite"),
    ],
)
def test_wrong_flags(flags: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        check(EngineArgs.from_kwargs(**flags))


def test_buckets():
    flags = {
        "bucket_time_to_first_token": "0.5 2.5",
        "bucket_e2e_request_latency": "7",
        "prompt_tokens_buckets": "custom 2 8",
        "generation_tokens_buckets": "tse 10 4 4",
    }
    check(EngineArgs.from_kwargs(**flags))
    text = get(FakeClient(), "/metrics", enable_metrics=True, **flags).text

    def bounds(name: str) -> list[str]:
        lines = [line for line in text.splitlines() if line.startswith(f"sglang:{name}_bucket")]
        return [line.partition('le="')[2].partition('"')[0] for line in lines]

    async def session(http: httpx.AsyncClient) -> str:
        await http.post("/generate", json={"text": "a"})
        return (await http.get("/metrics")).text

    text = talk(FakeClient(), session, enable_metrics=True, **flags)
    assert bounds("time_to_first_token_seconds") == ["0.5", "2.5", "+Inf"]
    assert bounds("e2e_request_latency_seconds") == ["7.0", "+Inf"]
    assert len(bounds("inter_token_latency_seconds")) == 21
    assert bounds("prompt_tokens_histogram") == ["2.0", "8.0", "+Inf"]
    assert bounds("generation_tokens_histogram") == ["0.0", "6.0", "10.0", "14.0", "26.0", "+Inf"]


def test_the_request_log_of_a_running_server(caplog: pytest.LogCaptureFixture):
    """/configure_logging: off, on at each level, off again; other observers are kept."""

    async def session(http: httpx.AsyncClient) -> list[str]:
        seen = []
        levels = [{"log_requests": True, "log_requests_level": 0}, *({"log_requests_level": i} for i in (1, 2, 3))]
        for change in ({}, *levels, {"log_requests": False}):
            assert (await http.post("/configure_logging", json=change)).status_code == 200
            caplog.clear()
            answer = await http.post("/generate", json={"text": "a b " * 600})
            assert answer.status_code == 200, answer.text
            lines = [record.getMessage() for record in caplog.records]
            assert sum("Req Time Stats" in line for line in lines) == 1
            seen.append(" ".join(line for line in lines if line.startswith(("Receive", "Finish"))))
        refused = await http.post("/configure_logging", json={"log_requests_level": 4})
        assert refused.status_code == 400 and "log_requests_level" in refused.text
        assert (await http.post("/configure_logging", json={"dump_requests_folder": "/tmp"})).status_code == 400
        return seen

    client = FakeClient(context_len=4096, max_req_input_len=4000, max_total_num_tokens=8192)
    with caplog.at_level(logging.INFO, "moe_engine.server"):
        before, bare, sampled, cut, whole, after = talk(client, session, enable_request_time_stats_logging=True)
    assert before == after == ""
    assert "Receive" in bare and "Finish" in bare and "sampling_params" not in bare
    assert "sampling_params" in sampled and "'text'" not in sampled
    assert " ..." in cut and len(cut) < len(whole) and " ..." not in whole


def test_freezing_the_garbage_collectors():
    import gc

    client = FakeClient()
    try:
        answer = post(client, "/freeze_gc", {})
        assert (answer.status_code, answer.text) == (200, "Garbage collection frozen.\n")
        assert gc.get_freeze_count() > 0 and [name for name, _ in client.rank_calls] == ["freeze_gc"]
    finally:
        gc.unfreeze()
