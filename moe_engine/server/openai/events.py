"""Events of OpenAI's streams: chunks of one choice, then usage and extra fields, then [DONE]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moe_engine.config.server import ServerArgs
from moe_engine.frontend.frontend import Job
from moe_engine.frontend.generation import Generation
from moe_engine.server.errors import openai_body
from moe_engine.server.event_stream import DONE, DataEvents, sse
from moe_engine.server.http_io import encode_json
from moe_engine.server.openai.answers import Usage
from moe_engine.server.openai.extras import NO_FIELDS, ChoiceExtras, answer_extras, wants_usage
from moe_engine.server.openai.types import CommonRequest

PLAIN_END = b',"logprobs":null,"finish_reason":null,"matched_stop":null}]}\n\n'
"""JSON of an event that has only a text or delta, after it."""


class ChunkEvents(DataEvents):
    """Base. Most events have only a text or delta; the JSON around it is made once.

    Args:
        head: fields of a chunk before its choices.
        usage: of some of the job's sequences.
    """

    def __init__(
        self,
        req: CommonRequest,
        job: Job,
        head: dict[str, Any],
        usage: Callable[[list[Generation]], Usage],
        flags: ServerArgs,
    ) -> None:
        super().__init__(openai_body)
        self._job = job
        self._head = head
        self._usage = usage
        options = req.stream_options
        self._continuous = bool(options and options.continuous_usage_stats)
        self._with_usage = wants_usage(req, flags)
        self._extras = ChoiceExtras(req)
        self._is_plain = not (self._continuous or self._extras.has_ids)
        """Events of pieces with text alone have no other fields."""
        self._answer_extras = lambda: answer_extras(req, flags, job.generations)

    def _plain_start(self, g: Generation, field: bytes) -> bytes:
        """A plain event up to the value of its choice's `field`."""
        return b"data: " + encode_json(self._head)[:-1] + b',"choices":[{"index":%d,"%s":' % (g.index, field)

    def _chunk(self, g: Generation, choice: dict[str, Any], top: Mapping[str, Any] = NO_FIELDS) -> bytes:
        chunk = {**self._head, "choices": [choice], **top}
        if self._continuous:
            chunk["usage"] = self._usage([g])
        return sse(chunk)

    def end(self) -> bytes:
        last: dict[str, Any] = self._answer_extras()
        if self._with_usage:
            last["usage"] = self._usage(self._job.generations)
        return sse({**self._head, "choices": [], **last}) + DONE if last else DONE
