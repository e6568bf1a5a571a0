"""Profiling of all ranks from the frontend."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from moe_engine.errors import InputError
from moe_engine.frontend.client_api import CallError, EngineClient, values_of

DIRECTORY_VARIABLE = "SGLANG_TORCH_PROFILER_DIR"
WRITE_SECONDS = 600.0


class Profiling:
    """Each rank writes a trace of its own; the calls return the paths."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def start(self, output_dir: str | None, profile_id: str | None, options: Mapping[str, Any]) -> list[str]:
        """Raises InputError: names the ranks that cannot start."""
        folder = output_dir or os.environ.get(DIRECTORY_VARIABLE) or tempfile.gettempdir()
        name = profile_id or str(time.time())

        def args(replica: int | None) -> dict[str, Any]:
            prefix = name if replica is None else f"{name}-DP-{replica}"
            return {"output_dir": os.path.abspath(folder), "prefix": prefix, **options}

        groups = await self._client.ask_ranks("start_profile", args)
        try:
            return list(values_of(groups, "start_profile"))
        except CallError as error:
            if any(group.values for group in groups):  # all or none
                await self._client.ask_ranks("stop_profile", deadline=WRITE_SECONDS)
            raise InputError(str(error)) from None

    async def stop(self) -> list[str]:
        """Raises InputError: 400, no rank has a trace; 500, ranks could not write theirs, for instance on a full
        disk."""
        try:
            paths = await self._client.collective_rpc("stop_profile", deadline=WRITE_SECONDS)
        except CallError as error:
            raise InputError(str(error), status=500) from None
        if None in paths:
            raise InputError("profiling is not in progress; call /start_profile first")
        return list(paths)
