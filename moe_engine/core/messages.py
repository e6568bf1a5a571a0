"""What crosses between the front-end process and an engine core process. One message a request, one a step.

Encoded with msgpack. Tags keep old and new message kinds apart on the wire.
"""

from __future__ import annotations

from typing import Any

import msgspec

from moe_engine.types import PackedLogprobs


class Message(msgspec.Struct, tag_field="kind", array_like=False, omit_defaults=True):
    """Base of all messages."""


# -- front end -> core


class AddRequest(Message, tag="add"):
    """A checked, tokenized request. `sampling` holds the fields of `types.SamplingParams`; `seed` is that of its draws,
    wherever it runs. `rid` is private to the front end and the engine: it begins with the client's id and is never used
    again, so that what a core still sends about a request that has left is not taken for news of a later one."""

    rid: str
    prompt_ids: list[int]
    sampling: dict[str, Any]
    max_new_tokens: int
    seed: int
    priority: int | None = None
    logprob_start: int | None = None
    return_logprob: bool = False
    top_logprobs: int = 0
    token_ids_logprob: list[int] = []
    extra_key: str | None = None
    arrival: float = 0.0
    routed_dp_rank: int | None = None
    """The scheduler that is to serve it; None leaves the choice to the client."""
    generated_ids: list[int] = []
    """Tokens that it was given by a scheduler that is lost: they are computed again, and generation goes on behind."""
    num_migrations: int = 0
    """How often it has lost its scheduler."""


class AbortRequest(Message, tag="abort"):
    """Ends exactly these requests; those that have ended already are left out. `reason` is what clients read."""

    rids: list[str]
    reason: str = "Aborted"


class Call(Message, tag="call"):
    """A control call that is answered by a `Reply` of the same id: flush_cache, internal_state, check_integrity, and
    those of `expert_calls`."""

    id: int
    method: str
    args: dict[str, Any] = {}


class Shutdown(Message, tag="shutdown"):
    """Ends the core: after the running requests when `drain`, at once otherwise."""

    drain: bool = True


# -- core -> front end


class RequestDelta(msgspec.Struct, array_like=True, omit_defaults=True):
    """What a step brought for one request. `finish` is the dict of `types.FinishReason`, or None."""

    rid: str
    token_ids: list[int]
    finish: dict[str, Any] | None = None
    logprobs: PackedLogprobs | None = None
    """Of the new tokens."""
    prompt_logprobs: PackedLogprobs | None = None
    """Of prompt tokens, in order; may arrive in pieces before the first token."""
    cached_tokens: int = 0
    retractions: int = 0
    queue_time: float = 0.0
    speculation: tuple[int, int, list[int]] | None = None
    """With the end, where drafts were made: steps that brought some, drafts, and those steps by drafts accepted."""


class StepOutput(Message, tag="step"):
    """`group`: the attention group it comes from."""

    deltas: list[RequestDelta]
    group: int = 0


class GroupsLost(Message, tag="lost"):
    """These attention groups are gone; the core's others go on. `message` says who was lost and how."""

    groups: list[int]
    message: str


class Reply(Message, tag="reply"):
    id: int
    ok: bool = True
    value: Any = None


class CoreReady(Message, tag="ready"):
    """Sent once: the core serves. `info` holds max_total_num_tokens, max_req_input_len, context_len, ..."""

    info: dict[str, Any]


class CoreFailed(Message, tag="failed"):
    """The core cannot continue, or could not start. `error` is the name of the error's class; a ``ConfigError`` is the
    user's to mend."""

    message: str
    error: str = "EngineDeadError"
    traceback: str = ""


ToCore = AddRequest | AbortRequest | Call | Shutdown
FromCore = StepOutput | GroupsLost | Reply | CoreReady | CoreFailed

encode = msgspec.msgpack.Encoder().encode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode
