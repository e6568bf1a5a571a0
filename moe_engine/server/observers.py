"""Log of the times of requests."""

from __future__ import annotations

import logging
from typing import Any

from moe_engine.frontend.frontend import Observer
from moe_engine.frontend.generation import Generation
from moe_engine.frontend.request_times import durations

logger = logging.getLogger("moe_engine.server")


class RequestTimeLog(Observer):
    """`--enable-request-time-stats-logging`: a line with the times of each sequence at its end."""

    def finished(self, generation: Generation) -> None:
        finish = generation.finish
        facts: dict[str, Any] = {
            "input_len": len(generation.prompt_ids),
            "output_len": len(generation.output_ids),
            "cached_len": generation.cached_tokens,
            "finish_reason": None if finish is None else finish["type"],
        }
        facts |= {name: f"{1000 * seconds:.2f}ms" for name, seconds in durations(generation).items()}
        words = ", ".join(f"{name}={value}" for name, value in facts.items())
        logger.info("Req Time Stats(rid=%s): %s", generation.rid, words)
