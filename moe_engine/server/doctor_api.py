"""``/doctor``: the rules of the tuning guides on this server's last minutes, as JSON and as a page."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moe_engine.server.control_api import internal_states
from moe_engine.server.http_io import json_response, read_query
from moe_engine.server.live_pages import HEADERS, page, wants_page
from moe_engine.server.native_types import DoctorQuery, DoctorReport
from moe_engine.server.openapi import HTML
from moe_engine.server.state import ServerState
from moe_engine.tuning.doctor.diagnosis import Costs, Diagnosis
from moe_engine.tuning.doctor.launch import Launch
from moe_engine.tuning.doctor.live import Sampler
from moe_engine.tuning.doctor.log_lines import LogEvent
from moe_engine.tuning.doctor.report import Report, make_report
from moe_engine.tuning.doctor.window import Window

SAMPLE_SECONDS = 2.0
KEPT_SECONDS = 600.0
ADJUSTABLE = ("max_running_requests", "chunked_prefill_size")
"""Settings of a scheduler that /set_internal_state changes while it runs, and that the rules need."""


@dataclass
class History:
    """Samples of the schedulers of the last minutes, taken while requests run. `costs`: of the launch's ledger."""

    costs: Costs | None = None
    _events: deque[LogEvent] = field(default_factory=deque)
    _sampler: Sampler | None = None
    _was_busy: bool = True
    _changed: dict[str, Any] = field(default_factory=dict)
    """Settings in force where a request has changed them; the autopilot adapts its own."""

    async def watch(self, state: ServerState) -> None:
        """Takes samples until it is cancelled."""
        while True:
            await self.sample(state)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def sample(self, state: ServerState) -> None:
        """One message to each core; none while the server is idle, except at the end of the last requests."""
        health = state.client.health()
        busy = bool(health.num_running or health.num_waiting)
        if busy or self._was_busy:
            self.take(state, await internal_states(state), time.monotonic())
        self._was_busy = busy

    def take(self, state: ServerState, states: Sequence[Mapping[str, Any]], now: float) -> None:
        """Adds the states of the cores."""
        if self._sampler is None:
            self._sampler = Sampler(launch_of(state))
        if states and not state.settings.server_args.get("autopilot"):
            self._changed = {name: states[0][name] for name in ADJUSTABLE if name in states[0]}
        self._events.extend(self._sampler.states(list(states), now))
        while self._events and (self._events[0].time or 0.0) < now - KEPT_SECONDS:
            self._events.popleft()

    def report(self, state: ServerState, minutes: float) -> Report:
        """The report of the last `minutes`."""
        launch = launch_of(state)
        launch.sizes |= self._changed
        window, since = Window(launch, of_log=False), time.monotonic() - 60 * minutes
        for event in tuple(self._events):
            if (event.time or 0.0) >= since:
                window.add(event)
        diagnosis = Diagnosis(self.costs)
        diagnosis.add(window.statistics())
        source = f"{state.model_name}, the last {minutes:g} minutes"
        return make_report(source, "moe-engine", diagnosis, num_batches=window.num_decode)


def launch_of(state: ServerState) -> Launch:
    """The launch of this server, as its /server_info reports it."""
    info = state.client.info
    return Launch(
        flags={**state.settings.server_args, "page_size": info.page_size},
        engine="moe-engine",
        flags_as_given=True,
        ready=True,
        weights_gb=info.weight_bytes / 2**30,
        kv_gb=info.kv_bytes / 2**30,
        kv_tokens=info.max_total_num_tokens,
        sizes={"max_running_requests": info.max_running_requests},
    )


class DoctorApi:
    def __init__(self, state: ServerState, history: History) -> None:
        self._state = state
        self._history = history

    async def doctor(self, request: Request) -> Response:
        """What to change for the load of the last minutes.

        For browsers a page.
        """
        if wants_page(request.headers.get("accept", "")):
            return Response(page("doctor_page"), media_type=HTML, headers={**HEADERS, "vary": "accept"})
        minutes = read_query(request, DoctorQuery).minutes
        report = await asyncio.to_thread(self._history.report, self._state, minutes)
        answer: DoctorReport = {**report.as_json(), "text": report.as_text()}  # type: ignore[typeddict-item]
        response = json_response(answer)
        response.headers["vary"] = "accept"
        return response
