"""Messages between ranks and their supervisor, beyond those of `executor.messages`."""

from __future__ import annotations

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


# -- from the supervisor


class Regroup(messages.RankMessage, tag="regroup"):
    """Ranks were lost; the survivors continue."""

    survivors: Survivors


decode_to_supervisor = msgspec.msgpack.Decoder(messages.ToLeader | StepFailed | Ready).decode
decode_to_rank = msgspec.msgpack.Decoder(messages.ToRank | Regroup).decode
