"""``moe-engine doctor --log`` and ``--url``: output, exit codes, wrong input."""

from __future__ import annotations

import gzip
import io
import json
import random
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from moe_engine.cli import doctor_logs
from moe_engine.cli.main import main
from moe_engine.errors import ConfigError
from moe_engine.processes.addresses import free_port
from moe_engine.tuning.doctor.live import LiveServer, Sampler, sample
from moe_engine.tuning.doctor.rules import RULES
from moe_engine.tuning.doctor.window import Window
from tests.tuning import logs
from tests.tuning.logs import decode, decodes, flags, retraction

GOOD = [logs.startup(), *decodes(running=300, usage=0.95, queue=200)]
BAD = [*GOOD, *[retraction(25) for _ in range(6)]]


@pytest.fixture
def log(tmp_path):
    def write(lines, name="server.log"):
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    return write


def test_exit_code_and_text(log, capsys):
    assert main(["doctor", "--log", log(GOOD)]) == 0
    assert "no rule recommends a change" in capsys.readouterr().out
    path = log(BAD)
    assert main(["doctor", "--log", path]) == 1
    text = capsys.readouterr().out
    assert "WARNING retractions" in text and "--schedule-conservativeness 1.3" in text
    assert f"line {len(BAD)}: {BAD[-1]}"[:60] in text and "6 retractions, 6.0 a minute" in text


def test_an_empty_queue_is_no_error_of_the_server(log, capsys):
    assert main(["doctor", "--log", log([logs.startup(), *decodes(running=1, usage=0.1, queue=0)])]) == 0
    assert "INFO queue_empty" in capsys.readouterr().out


def test_json(log, capsys):
    assert main(["doctor", "--log", log([*BAD, BAD[1][:70]]), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["healthy"], found["num_broken"], found["num_batches"]) == (False, 1, 20)
    (finding,) = found["findings"]
    assert (finding["name"], finding["flag"], finding["value"]) == ("retractions", "--schedule-conservativeness", 1.3)
    assert finding["line"] == BAD[-1] and "tp_or_dp" in found["without_facts"]


def test_standard_input(monkeypatch, capsys):
    data = "".join(f"{line}\n" for line in BAD).encode() + b"\xff\xfe broken bytes\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["doctor", "--log", "-"]) == 1
    assert capsys.readouterr().out.startswith("standard input: 28 lines")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--log", "/nowhere/server.log"], "no such file"),
        (["--log", "/"], "cannot be read"),
        (["--log", "FILE", "--url", "x"], "give one of the two"),
        (["--log", "FILE", "--window", "-1"], "--window -1: must be seconds"),
        (["--log", "FILE", "--window", "nan"], "--window nan: must be seconds"),
        (["--log", "-", "--follow"], "--follow belongs to --log FILE"),
        (["--follow"], "--follow needs --log FILE"),
        (["--log", "GZ", "--follow"], "--follow: a compressed log does not grow"),
        (["--log", "FILE", "--api-key", "k"], "--api-key belongs to --url"),
        (["--api-key", "k"], "--api-key needs --url"),
        (["--window", "300"], "--window needs --log FILE or --url URL"),
        (["--sample-seconds", "5"], "--sample-seconds needs --url"),
        (["--log", "FILE", "--sample-seconds", "5"], "--sample-seconds belongs to --url"),
        (["--url", "http://localhost:port"], "not an address"),
        (["--url", "localhost:1", "--window", "0"], "--window 0: only a log has a begin"),
        (["--url", "localhost:1", "--sample-seconds", "nan"], "--sample-seconds nan: must be"),
    ],
)
def test_wrong_words(words, message, log, tmp_path, capsys):
    files = {"FILE": log(GOOD), "GZ": str(tmp_path / "log.1")}
    (tmp_path / "log.1").write_bytes(gzip.compress(b"hello"))
    words = [files.get(word, word) for word in words]
    assert main(["doctor", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_log_of_something_else(log, capsys):
    assert main(["doctor", "--log", log(["INFO hello", decode(1)[:70]])]) == 2
    error = capsys.readouterr().err
    assert "2 lines, and no 'Decode batch' or 'Prefill batch' line among them (1 are cut off); give" in error
    assert error.count("\n") == 1


def test_a_log_without_its_beginning(log, capsys):
    for lines, hint in ((BAD, True), ([flags(), *BAD], False)):
        assert main(["doctor", "--log", log(lines)]) == 1
        assert ("no server_args line" in capsys.readouterr().out) is hint


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        (
            "vLLM",
            "(APIServer pid=7) INFO 05-19 10:13:11 [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 tokens/s, "
            "Avg generation throughput: 90.1 tokens/s, Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 9.1%",
        ),
        (
            "TensorRT-LLM",
            "[01/16/2026-06:20:17] [TRT-LLM] [RANK 0] [I] iter = 5, host_step_time = 50.5ms, num_scheduled_requests: 3,"
            " states = {'num_ctx_requests': 2, 'num_ctx_tokens': 16384, 'num_generation_tokens': 0}",
        ),
    ],
)
def test_a_log_of_another_engine(engine, line, log, capsys):
    assert main(["doctor", "--log", log(["INFO hello", line])]) == 2
    error = capsys.readouterr().err
    assert f"a log of {engine}, in a format that is not known" in error and error.count("\n") == 1
    assert main(["doctor", "--log", log([line, "torch.OutOfMemoryError: CUDA out of memory."])]) == 2
    assert f"a log of {engine}, in a format" in capsys.readouterr().err


def test_an_error_without_a_rule_is_shown(log, capsys):
    lines = [
        "INFO hello",
        "Traceback (most recent call last):",
        "ValueError: Not enough host memory. \x1b[0mReduce it.",
    ]
    assert main(["doctor", "--log", log(lines)]) == 2
    error = capsys.readouterr().err
    assert error.endswith("in line 3, and no rule is about it: ValueError: Not enough host memory. Reduce it.\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ([logs.startup(17.22)], "memory_unused"),
        ([logs.retraction(0), logs.retraction(9)], "retractions"),
    ],
)
def test_an_excerpt_without_batches(lines, rule, log, capsys):
    assert main(["doctor", "--log", log(lines)]) == 1
    assert f"WARNING {rule}" in capsys.readouterr().out


def test_a_log_that_ends_before_the_first_batch(log, capsys):
    """The server ran out of memory while it captured graphs: the log has no batch, and the report has a
    recommendation."""
    lines = [logs.startup(), "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"]
    assert main(["doctor", "--log", log(lines)]) == 1
    assert "oom_prefill" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16(encoding, tmp_path, monkeypatch, capsys):
    """PowerShell writes it, with a byte-order mark and CR LF; whole, from standard input, and while it grows."""
    path, text = tmp_path / "server.log", "\ufeff" + "".join(f"{line}\r\n" for line in [*BAD, "a line of \u4e2d\u0a0d"])
    path.write_bytes(text.encode(encoding))
    assert main(["doctor", "--log", str(path)]) == 1
    assert capsys.readouterr().out.startswith(f"{path}: {len(BAD) + 1} lines")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode(encoding))))
    assert main(["doctor", "--log", "-"]) == 1
    monkeypatch.setattr(doctor_logs, "FOLLOW_SECONDS", 0.0)
    path.write_bytes("\ufeffone\ntw".encode(encoding))
    lines = doctor_logs._growing(str(path))
    assert [next(lines), next(lines)] == ["one\n", None]
    with path.open("ab") as file:
        file.write("o\nthree\n".encode(encoding))
    assert [next(lines), next(lines)] == ["two\n", "three\n"]


@pytest.mark.parametrize("name", ["server.log.gz", "server.log.1"])
def test_compressed_logs(name, tmp_path, monkeypatch, capsys):
    """By their content: a rotation gives them any name, and standard input has none. Of a log that is cut off or
    damaged the first part counts."""
    lines = [*BAD, *[f"line {random.random()}" for _ in range(20000)]]
    whole, path = gzip.compress("".join(f"{line}\n" for line in lines).encode()), tmp_path / name
    path.write_bytes(whole)
    assert main(["doctor", "--log", str(path)]) == 1
    assert capsys.readouterr().out.startswith(f"{path}: {len(lines)} lines")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(whole)))
    assert main(["doctor", "--log", "-"]) == 1
    capsys.readouterr()
    for damaged in (whole[: len(whole) // 2], whole[: len(whole) // 2] + random.randbytes(999), whole[:-8] + bytes(8)):
        path.write_bytes(damaged)
        assert main(["doctor", "--log", str(path)]) == 1
        text = capsys.readouterr()
        assert text.out.startswith(f"{path}: ") and "is the last that can be read" in text.err
        assert text.err.count("\n") == 1
    for short in (2, 9, 12):
        path.write_bytes(whole[:short])
        assert main(["doctor", "--log", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") <= 2
    path.write_text("hello")
    assert main(["doctor", "--log", str(path)]) == 2
    assert "1 lines, and no 'Decode batch'" in capsys.readouterr().err


def test_follow(log):
    path = log(GOOD)
    command = [sys.executable, "-m", "moe_engine.cli.main", "doctor", "--log", path, "--follow"]

    def heed_interrupts() -> None:  # background jobs of a shell ignore interrupts, and so would the command
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed_interrupts) as process:
        try:
            text = "".join(f"{line}\n" for line in BAD[len(GOOD) :])
            with open(path, "a") as file:  # in two pieces, split in the middle of a line
                file.write(text[:150])
                file.flush()
                file.write(text[150:])
            first = next(line for line in process.stdout if "retractions" in line)
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            code = process.wait(20)
    assert first.startswith("WARNING retractions") and f"1 of {len(RULES)} rules recommend a change" in rest
    assert code == 1


def test_growing_file_is_read_after_a_rotation(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_logs, "FOLLOW_SECONDS", 0.0)
    path = tmp_path / "log"
    path.write_text("one\ntw")
    lines = doctor_logs._growing(str(path))
    assert [next(lines), next(lines)] == ["one\n", None]
    with path.open("a") as file:
        file.write("o\n")
    assert next(lines) == "two\n"
    path.rename(tmp_path / "log.1")
    path.write_text("three\n")
    assert [next(lines), next(lines)] == [None, "three\n"]
    path.write_text("4\n")  # truncated and written again
    assert [next(lines), next(lines)] == [None, "4\n"]


# -- servers

INFO = {"model_path": "/nowhere", "tp_size": 1, "max_running_requests": 64, "schedule_policy": "fcfs",
        "internal_states": [{"memory_usage": {"weight": 10.0, "kvcache": 20.0, "token_capacity": 1000}}]}  # fmt: skip
PAGE = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 12.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m",tp_rank="0"} %d
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m",tp_rank="0"} 0.4
# TYPE sglang:num_retracted_requests counter
sglang:num_retracted_requests_total{model_name="m",tp_rank="0"} %d
"""


def sglang(metrics: bool, key: str | None = None):
    """SGLang's endpoints, with a queue and retractions that grow with every call."""
    calls = {"n": 0}

    def answer(request: httpx.Request) -> httpx.Response:
        calls["n"] += 1
        if key and request.headers.get("authorization") != f"Bearer {key}":
            return httpx.Response(401)
        if request.url.path in ("/server_info", "/get_server_info"):
            return httpx.Response(200, json=INFO)
        if request.url.path.rstrip("/") == "/metrics" and metrics:
            return httpx.Response(200, text=PAGE % (calls["n"], 2 * calls["n"]))
        if request.url.path == "/get_load":
            return httpx.Response(200, json=[{"dp_rank": 0, "num_reqs": 70, "num_waiting_reqs": 6, "num_tokens": 400}])
        return httpx.Response(404)

    return httpx.MockTransport(answer)


@pytest.mark.parametrize("metrics", [True, False])
def test_samples_of_sglang(metrics):
    server = LiveServer("http://test", transport=sglang(metrics))
    assert server.doctor(5) is None
    ticks = iter(range(0, 1000, 2))
    launch, events = sample(server, 20, clock=lambda: float(next(ticks)), sleep=lambda seconds: None)
    window = Window(launch, of_log=False)
    for event in events:
        window.add(event)
    found = window.statistics()
    assert launch.kv_tokens == 1000 and launch.flag("max_running_requests") == 64
    assert found.running == (12 if metrics else 64)
    assert found.usage == 0.4 and found.room_but_waiting == 1.0
    assert (found.retractions > 0) == metrics and found.oom_decode is None


def test_keys_and_strangers():
    with pytest.raises(ConfigError, match=r"refuses the key \(401\); give its own with --api-key"):
        LiveServer("http://test", "wrong", transport=sglang(True, "k")).server_info()
    assert LiveServer("http://test", "k", transport=sglang(True, "k")).server_info() == INFO
    stranger = httpx.MockTransport(lambda request: httpx.Response(404))
    with pytest.raises(ConfigError, match="not a server of moe-engine or SGLang"):
        LiveServer("http://test", transport=stranger).server_info()


def test_a_proxy_with_a_prefix_and_pages_of_its_own():
    """A page without metrics is read as if there were none."""
    inner = sglang(metrics=False)

    def proxy(request: httpx.Request) -> httpx.Response:
        assert request.url.path.startswith("/models/v3/")
        if "metrics" in request.url.path:
            return httpx.Response(200, text="<html>Sign in</html>")
        url = str(request.url).replace("/models/v3", "")
        return inner.handler(httpx.Request(request.method, url, headers=request.headers))

    server = LiveServer("http://test/models/v3/", transport=httpx.MockTransport(proxy))
    ticks = iter(range(0, 1000, 2))
    _, events = sample(server, 9, clock=lambda: float(next(ticks)), sleep=lambda seconds: None)
    assert [event.values["running"] for event in events] == [64] * 3


@pytest.mark.parametrize("state", [3, {"num_running": 1}, {"num_running": "x", "num_waiting": 1, "token_usage": 0}])
def test_strange_answers_are_one_line(state, monkeypatch, capsys):
    info = {"alive_dp_ranks": [0], "internal_states": [{"memory_usage": {}}, state]}
    strange = httpx.MockTransport(
        lambda request: httpx.Response(200, json=info) if request.url.path == "/server_info" else httpx.Response(404)
    )
    monkeypatch.setattr(doctor_logs, "LiveServer", lambda url, key: LiveServer(url, key, strange))
    assert main(["doctor", "--url", "http://test", "--sample-seconds", "0.1"]) == 2
    error = capsys.readouterr().err
    assert "an answer has fields that are not SGLang's or moe-engine's" in error and error.count("\n") == 1


def test_a_port_without_https(capsys):
    with web(b"x") as url:
        assert main(["doctor", "--url", url.replace("http:", "https:")]) == 2
    error = capsys.readouterr().err
    assert "this port has no https; use http://" in error and error.count("\n") == 1


def test_a_window_that_the_server_refuses():
    refusing = httpx.MockTransport(lambda request: httpx.Response(400, text="minutes: at most 10"))
    with pytest.raises(ConfigError, match="--window 6000: the server refuses it: minutes: at most 10"):
        LiveServer("http://test", transport=refusing).doctor(100.0)


def test_unreachable(capsys):
    assert main(["doctor", "--url", f"127.0.0.1:{free_port()}"]) == 2
    error = capsys.readouterr().err
    assert "no server answers" in error and "check host and port" in error and error.count("\n") == 1


def test_counters_that_start_again_are_no_growth():
    sampler = Sampler(logs.read(GOOD).launch)
    totals = [5.0, 9.0, 1.0, 2.0]
    grown = [sum(1 for _ in sampler.counted({"retractions": value}, "DP0", 0.0)) for value in totals]
    assert grown == [0, 4, 0, 1]


@contextmanager
def web(body: bytes):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def test_a_web_server_is_named(capsys):
    with web(b"<html>hello</html>") as url:
        assert main(["doctor", "--url", url]) == 2
    assert "not a server of moe-engine or SGLang" in capsys.readouterr().err


def test_costs_are_the_ledgers(log, capsys):
    """For a log with a local model: the difference of two ledgers that `plan` prints."""
    from moe_engine.demo import CHECKPOINT_DIR

    lines = [flags(model_path=str(CHECKPOINT_DIR), device="cpu", chunked_prefill_size=256), logs.startup(
        chunked_prefill_size=256), *[logs.prefill(s, new=256, seqs=1) for s in range(6)]]  # fmt: skip
    assert main(["doctor", "--log", log(lines), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    rows = []
    for chunk in ("256", str(finding["value"])):
        main(["plan", "--model-path", str(CHECKPOINT_DIR), "--chunked-prefill-size", chunk, "--json"])
        rows.append({row["name"]: row["num_bytes"] for row in json.loads(capsys.readouterr().out)["memory"]["rows"]})
    changed = {name: rows[1][name] - rows[0][name] for name in rows[0] if rows[0][name] != rows[1][name]}
    assert finding["name"] == "long_prompts" and changed
    assert finding["memory_bytes"] == sum(changed.values()) and all(name in finding["memory"] for name in changed)
