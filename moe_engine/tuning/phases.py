"""Where the time of a request goes: its phases, as a server measured them or as the simulator computes them."""

from __future__ import annotations

from typing import Any

from moe_engine.tuning.answer import Answer

READ = "read"
QUEUE = "queue"
PREFILL = "prefill"
DELIVERY = "delivery"
DECODE = "decode, a token"
END = "end"
PHASES = {
    READ: "from the client's call until the frontend has read the request",
    QUEUE: "in the scheduler's queue",
    PREFILL: "from there until the frontend has the first token, and the way to the scheduler",
    DELIVERY: "from there until the client has it",
    DECODE: "mean time between two tokens at the frontend",
    END: "from the last token at the frontend until the client has the end",
}


def measured(answer: Answer, meta: dict[str, Any], to_unix: float) -> dict[str, float]:
    """Phases of an ended answer, in seconds; empty if the server does not report its times.

    Args:
        meta: `meta_info` of its last chunk.
        to_unix: Unix time less the clock of `answer.started`.
    """
    received, first = meta.get("request_received_ts"), meta.get("first_token_latency")
    if received is None or first is None:
        return {}
    read = received - to_unix - answer.started
    queue = meta.get("queue_time", 0.0)
    found = {READ: read, QUEUE: queue, PREFILL: first - queue, DELIVERY: answer.ttft - read - first}
    if rate := meta.get("decode_throughput"):
        found[DECODE] = 1 / rate
    return found | {END: answer.latency - read - meta["e2e_latency"]}
