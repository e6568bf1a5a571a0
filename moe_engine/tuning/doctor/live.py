"""Samples a running server over HTTP -> the events that its log would have.

This engine's servers keep a history of the last minutes (``/doctor``). SGLang's are sampled once a second, by
/server_info, /v1/loads or /get_load, and /metrics where it is enabled; no request is sent for generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from moe_engine.errors import ConfigError
from moe_engine.tuning.doctor.launch import Launch
from moe_engine.tuning.doctor.log_lines import LogEvent

TIMEOUT = 10.0
INFO_PATHS = ("/server_info", "/get_server_info")
METRICS = {
    "num_running_reqs": "running",
    "num_queue_reqs": "queue",
    "num_decode_prealloc_queue_reqs": "prealloc",
    "token_usage": "usage",
    "full_token_usage": "kv_usage",
    "swa_token_usage": "swa_usage",
    "mamba_usage": "mamba_usage",
    "gen_throughput": "throughput",
    "is_cuda_graph": "cuda_graph",
    "spec_accept_length": "accept_len",
}
TOTALS = {
    "num_retracted_requests_total": "retractions",
    "prompt_tokens_total": "prompt",
    "cached_tokens_total": "cached",
}


class LiveServer:
    """A server at `url`. Raises ConfigError, in one line with the fix, if it cannot be read."""

    def __init__(self, url: str, api_key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url if "://" in url else f"http://{url}"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT, transport=transport)
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"--url {url}: not an address ({error}); use http://HOST:PORT") from None

    def close(self) -> None:
        self._http.close()

    def doctor(self, minutes: float) -> dict[str, Any] | None:
        """The server's own diagnosis of its last minutes; None: it has no /doctor."""
        answer = self._get("/doctor", params={"minutes": minutes}, headers={"accept": "application/json"})
        if answer.status_code == 400:
            raise ConfigError(f"--window {minutes * 60:g}: the server refuses it: {answer.text[:200]}")
        if answer.status_code != 200:
            return None
        found = _json(answer)
        return found if isinstance(found, dict) and "findings" in found else None

    def server_info(self) -> dict[str, Any]:
        for path in INFO_PATHS:
            answer = self._get(path)
            if answer.status_code == 200 and isinstance(found := _json(answer), dict):
                return found
        raise ConfigError(
            f"--url {self.url}: {' and '.join(INFO_PATHS)} answer {answer.status_code}: not a server of moe-engine or "
            "SGLang; give the server's own address, not that of a router"
        )

    def loads(self) -> list[Mapping[str, Any]]:
        """Running and waiting requests of each DP rank; empty if the server has neither endpoint."""
        answer = self._get("/v1/loads")
        if answer.status_code == 200 and isinstance(found := _json(answer), dict):
            return list(found.get("loads", ()))
        answer = self._get("/get_load")
        found = _json(answer) if answer.status_code == 200 else None
        return [
            {**load, "num_running_reqs": load.get("num_reqs", 0) - load.get("num_waiting_reqs", 0)}
            for load in found or ()
            if isinstance(load, dict)
        ]

    def metrics(self) -> str | None:
        """The server's Prometheus page; None: the server has none, or a page of a proxy is in its place."""
        for path in ("/metrics/", "/metrics"):
            answer = self._get(path)
            if answer.status_code == 200 and "num_running_reqs" in answer.text:
                return answer.text
        return None

    def _get(self, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self._http.get(path, follow_redirects=True, **options)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            fix = "check host and port, and that the server is READY"
            if "CERTIFICATE" in why:
                fix = "set SSL_CERT_FILE to the file with the certificate of its authority"
            elif "SSL" in why:
                fix = "this port has no https; use http:// or the port with https"
            raise ConfigError(f"--url {self.url}: no server answers ({why}); {fix}") from None
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"--url {self.url}: the server refuses the key ({answer.status_code}); give its own with --api-key"
            )
        return answer


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


def launch_of(info: Mapping[str, Any]) -> Launch:
    """The launch of a /server_info."""
    memory: dict[str, Any] = next(
        (s["memory_usage"] for s in info.get("internal_states") or () if "memory_usage" in s), {}
    )
    return Launch(
        flags=dict(info),
        engine="moe-engine" if "alive_dp_ranks" in info else "sglang",
        flags_as_given="alive_dp_ranks" in info,
        ready=True,
        weights_gb=memory.get("weight"),
        kv_gb=memory.get("kvcache"),
        kv_tokens=memory.get("token_capacity") or info.get("max_total_num_tokens"),
        kv_dtype=info.get("kv_cache_dtype") if info.get("kv_cache_dtype") != "auto" else info.get("dtype"),
    )


@dataclass
class Sampler:
    """Events of a server, from samples: a decode event for each rank and sample, and events for counters that grew
    since the sample before."""

    launch: Launch
    _totals: dict[tuple[str, str], float] = field(default_factory=dict)

    def states(self, states: list[Mapping[str, Any]], now: float) -> Iterator[LogEvent]:
        """Events of `internal_states` of this engine: one state for each DP rank."""
        for number, state in enumerate(states):
            rank = f"DP{state.get('dp_rank', number)}"  # a lost rank has no state
            if state.get("num_running") or state.get("num_waiting"):
                values = {
                    "running": float(state["num_running"]),
                    "queue": float(state["num_waiting"]),
                    "usage": float(state["token_usage"]),
                    "throughput": float(state.get("last_gen_throughput") or 0.0),
                    "cuda_graph": float(bool(state.get("is_cuda_graph"))),
                }
                if (accept := self._accept_len(state, rank)) is not None:
                    values["accept_len"] = accept
                yield LogEvent("decode", now, rank, values)
            totals = {
                "retractions": state.get("num_retractions_total"),
                "prompt": state.get("prompt_tokens_total"),
                "cached": state.get("cached_tokens_total"),
                "jit": state.get("compilations_after_ready"),
            }
            yield from self.counted({key: value for key, value in totals.items() if value is not None}, rank, now)
            if (balance := (state.get("balancedness") or {}).get("100")) is not None:
                yield LogEvent("balance", now, rank, {"last_100_average": float(balance)})

    def _accept_len(self, state: Mapping[str, Any], rank: str) -> float | None:
        """Tokens of a request and step with drafts, since the sample before."""
        speculation = state.get("speculation")
        if not speculation:
            return None
        steps = self._since("verify", rank, float(speculation["verify_total"]))
        accepted = self._since("accepted", rank, float(sum(speculation["accepted"])))
        return 1.0 + accepted / steps if steps else None

    def counted(self, totals: Mapping[str, float], rank: str, now: float) -> Iterator[LogEvent]:
        """Events of counters."""
        grown = {key: self._since(key, rank, value) for key, value in totals.items()}
        for _ in range(int(grown.get("retractions", 0))):
            yield LogEvent("retraction", now, rank, {"retracted": 1})
        for _ in range(int(grown.get("jit", 0))):
            yield LogEvent("jit", now, rank, {})
        prompt, cached = grown.get("prompt", 0.0), grown.get("cached", 0.0)
        if prompt:
            values = {"running": 0.0, "usage": 0.0, "queue": 0.0, "new_token": max(0.0, prompt - cached)}
            yield LogEvent("prefill", now, rank, {**values, "cached_token": cached, "is_sum": True})

    def _since(self, name: str, rank: str, value: float) -> float:
        """Growth of a counter; 0 at its first sample and after a restart of the server."""
        before = self._totals.get((name, rank), value)
        self._totals[name, rank] = value
        return max(0.0, value - before)

    def page(self, text: str, now: float) -> Iterator[LogEvent]:
        """Events of a Prometheus page."""
        ranks: dict[str, dict[str, float]] = {}
        totals: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix("sglang:").removeprefix("sglang_")
                if sample.labels.get("tp_rank", "0") not in ("0", "") and "dp_rank" not in sample.labels:
                    continue
                rank = f"DP{sample.labels.get('dp_rank') or 0}"
                if (key := METRICS.get(name)) is not None:
                    ranks.setdefault(rank, {})[key] = sample.value
                elif (key := TOTALS.get(name)) is not None:
                    totals.setdefault(rank, {})[key] = sample.value
        for rank, values in ranks.items():
            if not values.get("accept_len"):
                values.pop("accept_len", None)
            if {"running", "queue", "usage"} <= values.keys() and values["running"] + values["queue"] > 0:
                yield LogEvent("decode", now, rank, dict(values))
        for rank, counts in totals.items():
            yield from self.counted(counts, rank, now)

    def loads(self, loads: list[Mapping[str, Any]], now: float) -> Iterator[LogEvent]:
        """Events of /v1/loads or /get_load."""
        tokens = self.launch.kv_tokens
        for load in loads:
            running, queue = load.get("num_running_reqs", 0), load.get("num_waiting_reqs", 0)
            used = load.get("num_used_tokens", load.get("num_tokens", 0))
            usage = load.get("token_usage", used / tokens if tokens else None)
            if usage is not None and running + queue:
                values = {"running": float(running), "queue": float(queue), "usage": float(usage)}
                yield LogEvent("decode", now, f"DP{load.get('dp_rank', 0)}", values)


def sample(
    server: LiveServer, seconds: float, clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep, interval: float = 1.0,
) -> tuple[Launch, Iterator[LogEvent]]:  # fmt: skip
    """The launch of a server, and its events during the next `seconds`."""
    launch = launch_of(server.server_info())
    sampler = Sampler(launch)

    def events() -> Iterator[LogEvent]:
        end = clock() + seconds
        while True:
            now = clock()
            if launch.is_ours:
                yield from sampler.states(list(server.server_info().get("internal_states") or ()), now)
            elif (text := server.metrics()) is not None:
                yield from sampler.page(text, now)
            else:
                yield from sampler.loads(server.loads(), now)
            if clock() >= end:
                return
            sleep(interval)

    return launch, events()
