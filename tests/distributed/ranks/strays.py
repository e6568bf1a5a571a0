"""Frames that no peer would send: random bytes, and truncated, changed or misdirected messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from moe_engine.core import messages as core_messages
from moe_engine.core.dp_sync import StepFactsMessage
from moe_engine.core.rank_calls import RankAnswer
from moe_engine.executor import messages
from moe_engine.executor.plan_broadcast import Answer, Run, Step, Stop
from moe_engine.executor.progress import Position
from moe_engine.types import StepFacts, StepPlan

encode = msgspec.msgpack.Encoder().encode

MESSAGES: list[Any] = [
    messages.Hello(1, "host", 7, {"dtype": "same"}, "ipc://x"),
    messages.Beat(1, Position(3, 4, 5, "model", "sum"), [1.0, 2.0]),
    messages.Loaded(1, {"ops": "torch"}, "ipc://a", "ipc://b"),
    messages.Failed(1, "broken"),
    messages.Died(1, "was killed"),
    messages.Ended(1),
    messages.NodeHere(1, "host", 7),
    messages.NodeRefused("host", 7, "why"),
    messages.Welcome("ipc://x", "host", 1, "leader"),
    messages.Go(["a", "b"]),
    messages.Alive(),
    messages.Leave("why"),
    StepFactsMessage(1, 1, StepFacts(num_tokens=3)),
    Step(1, StepPlan(1, rows=[1], starts=[0], counts=[1], samples=[True], slots=[3])),
    Run(1, 4, "view_experts", {}),
    Answer(4, RankAnswer(1, [1])),
    Stop(1),
    core_messages.AddRequest("r", [1, 2, 3], {"temperature": 0.0}, 4, seed=0),
    core_messages.AbortRequest(["r"]),
    core_messages.Call(1, "flush_cache"),
    core_messages.Shutdown(),
    core_messages.StepOutput([core_messages.RequestDelta("r", [1])]),
    core_messages.CoreFailed("broken"),
]
ODD: list[Any] = [
    -1,
    99,
    1 << 40,
    -(1 << 62),
    1.5,
    float("nan"),
    "",
    "x" * 300,
    None,
    True,
    [],
    [[]],
    {},
    {"a": 1},
    b"\xff",
]


class Strays:
    """Generates such frames from a seed.

    Args:
        is_real: True for a frame that the receiver must accept as a peer's; such frames are not generated.
    """

    def __init__(self, seed: int, is_real: Callable[[bytes], bool]) -> None:
        self._rng, self._is_real = random.Random(seed), is_real

    def draw(self) -> list[bytes]:
        """The frames of one ZeroMQ message."""
        frames = [self._frame() for _ in range(self._rng.choice((1, 1, 1, 1, 0, 2, 3)))]
        if not frames:
            return [b""]
        return frames if len(frames) > 1 or not self._is_real(frames[0]) else [b"real", b"but in two"]

    def _frame(self) -> bytes:
        rng, body = self._rng, encode(self._rng.choice(MESSAGES))
        kind = rng.randrange(7)
        if kind == 0:
            return rng.randbytes(rng.choice((0, 1, 2, 5, 40, 2000)))
        if kind == 1:
            return body[: rng.randrange(len(body) + 1)]
        if kind == 2:
            changed = bytearray(body)
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            return bytes(changed)
        if kind == 3:
            cut = rng.randrange(len(body))
            return body[:cut] + rng.randbytes(rng.randint(1, 8)) + body[cut:]
        if kind == 4:
            return body + encode(rng.choice(MESSAGES))
        if kind == 5:
            return encode(self._retyped(msgspec.msgpack.decode(body)))
        return body

    def _retyped(self, value: Any) -> Any:
        """The message with some fields of other types."""
        rng = self._rng
        if isinstance(value, dict):
            return {key: rng.choice(ODD) if rng.random() < 0.4 else value[key] for key in value}
        return [rng.choice(ODD) if rng.random() < 0.4 else item for item in value]
