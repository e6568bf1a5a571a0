"""Messages between ranks and their supervisor, beyond those of `executor.messages`."""

from __future__ import annotations

from typing import Any

import msgspec

from moe_engine.core.engine_info import EngineInfo
from moe_engine.elastic.survivors import Survivors
from moe_engine.executor import messages

# -- to the supervisor


class StepFailed(messages.Failed, tag="step-failed"):
    """A step failed in this generation."""

    generation: int = 0


class Ready(messages.RankMessage, tag="ready"):
    """Sent before `Loaded`: the engine's facts for `core.messages.CoreReady`."""

    rank: int
    info: EngineInfo


class Ask(messages.RankMessage, tag="ask"):
    """A rank requests that all others run `method` of `worker.calls`. Answered by `Answers` with the same id."""

    rank: int
    id: int
    method: str


# -- from the supervisor


class Answers(messages.RankMessage, tag="answers"):
    """The other ranks' replies to `Ask`, in rank order; `error` if one failed."""

    id: int
    values: list[Any]
    error: str = ""


class Regroup(messages.RankMessage, tag="regroup"):
    """Ranks were lost; the survivors continue."""

    survivors: Survivors


decode_to_supervisor = msgspec.msgpack.Decoder(messages.ToLeader | StepFailed | Ready | Ask).decode
decode_to_rank = msgspec.msgpack.Decoder(messages.ToRank | Answers | Regroup).decode
