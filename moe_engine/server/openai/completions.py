"""/v1/completions endpoint."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moe_engine.errors import InputError
from moe_engine.frontend.frontend import Job
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.generation import Generation, Piece
from moe_engine.frontend.logprob_format import Columns, joined
from moe_engine.frontend.prepare import FormatOf
from moe_engine.server.best_of import RankedLogprobs, best
from moe_engine.server.bodies import Plan
from moe_engine.server.errors import openai_body
from moe_engine.server.event_stream import EventStream
from moe_engine.server.http_io import cancel_on_disconnect, decode_body, encode_json, json_response
from moe_engine.server.openai.answers import Usage
from moe_engine.server.openai.common import head_of, last_hidden_state, matched_stop, usage_of
from moe_engine.server.openai.events import PLAIN_END, ChunkEvents
from moe_engine.server.openai.extras import NO_FIELDS, ChoiceExtras, answer_extras
from moe_engine.server.openai.types import DEFAULT_MAX_TOKENS, CompletionRequest, generate_input, response_fields
from moe_engine.server.state import ServerState
from moe_engine.tokenizer.fill_in_middle import fill_in_middle


class CompletionsApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def completions(self, request: Request) -> Response:
        """Text completion."""
        plan = await self._state.bodies.plan(request, "completions")
        req, model = plan.options
        job = await cancel_on_disconnect(request, self._state.frontend.begin(plan.read, self._format(req)))
        if req.stream:
            events = _Events(req, job, head_of(job, model, "text_completion"), self._usage, self._state.flags)
            return EventStream(self._state.frontend, job, events, openai_body)
        await cancel_on_disconnect(request, self._state.frontend.collect(job))
        return json_response(self._answer(req, job, model))

    def _format(self, req: CompletionRequest) -> FormatOf:
        own = self._state.token_json_of(req).completion
        if _num_generated(req) == (req.n or 1):
            return own
        return lambda options: RankedLogprobs(None if req.logprobs is None else own(options))

    def read(self, body: bytes | bytearray) -> Plan:
        """`Plan.options`: the request without its prompt, the model's name."""
        req = decode_body(body, CompletionRequest)
        model = self._state.response_model(req.model)
        tokenizer = self._state.tokenizer()
        read = self._state.frontend.read(self._input(req))
        for prompt in read.prompts:
            if req.echo and prompt.text is None:
                prompt.text = tokenizer.decode(prompt.ids, skip_special_tokens=False)
        return Plan(read, (response_fields(req, prompt=""), model))

    def _input(self, req: CompletionRequest) -> GenerateInput:
        is_text = isinstance(req.prompt if isinstance(req.prompt, str) else req.prompt[0], str)
        _check(req, is_text)
        count, answered = _num_generated(req), req.n or 1
        prompt: Any = self._around(req) if req.suffix else req.prompt
        return generate_input(
            req if count == answered else msgspec.structs.replace(req, n=count),
            {**self._state.settings.sampling_defaults, "max_new_tokens": DEFAULT_MAX_TOKENS},
            "max_tokens",
            text=prompt if is_text else None,
            input_ids=None if is_text else prompt,
            text_field="prompt",
            ids_field="prompt",
            max_tokens_asked=req.max_tokens is not None,
            add_special_tokens=req.add_special_tokens is not False,
            return_logprob=req.logprobs is not None or count > answered,
            logprob_start_len=0 if req.echo else -1,
            top_logprobs_num=req.logprobs,
            top_logprobs_field="logprobs",
        )

    def _around(self, req: CompletionRequest) -> str | list[str]:
        """The prompts of an answer between prompt and suffix."""
        tokenizer, form = self._state.tokenizer(), self._state.flags.completion_template
        prompts: Any = [req.prompt] if isinstance(req.prompt, str) else req.prompt
        whole = [fill_in_middle(tokenizer, prompt, req.suffix or "", form) for prompt in prompts]
        return whole[0] if isinstance(req.prompt, str) else whole

    def _usage(self, generations: list[Generation]) -> Usage:
        return usage_of(generations, cache_report=self._state.flags.enable_cache_report)

    def _answer(self, req: CompletionRequest, job: Job, model: str) -> dict[str, Any]:
        choices, extras = [], ChoiceExtras(req)
        count = req.n or 1
        for g in job.generations if _num_generated(req) == count else best(job.generations, count):
            text, entries = g.text, g.output_logprobs
            if req.echo:
                text, entries = (g.prompt_text or "") + text, joined(g.prompt_logprobs, entries)
            choices.append(_choice(g, text, entries, g.finish) | last_hidden_state(g) | extras.whole(g))
        return head_of(job, model, "text_completion") | {
            "choices": choices,
            "usage": self._usage(job.generations),
            "metadata": {"weight_version": job.generations[0].weight_version},
            **answer_extras(req, self._state.flags, job.generations),
        }


class _Events(ChunkEvents):
    def __init__(self, req: CompletionRequest, *chunks: Any) -> None:
        super().__init__(req, *chunks)
        self._echo = req.echo
        self._before: dict[int, bytes] = {}
        """By index of the sequence: a plain event up to its text."""

    def of(self, piece: Piece) -> bytes:
        g, text, entries = piece.generation, piece.text, piece.logprobs
        more = self._extras.ids(piece.token_ids) if self._extras.has_ids else NO_FIELDS
        if g.index not in self._before:
            more = {**more, **self._extras.begin(g)}
            self._before[g.index] = self._plain_start(g, b"text")
            if self._echo:
                text, entries = (g.prompt_text or "") + text, joined(g.prompt_logprobs, entries)
        if not (text or piece.finish or entries or more):
            return b""
        if self._is_plain and not (entries or more or piece.finish):
            return self._before[g.index] + encode_json(text) + PLAIN_END
        return self._chunk(g, {**_choice(g, text, entries, piece.finish), **more})

    def around_text(self, generation: Generation) -> tuple[bytes, bytes] | None:
        before = self._before.get(generation.index)
        return (before, PLAIN_END) if before is not None and self._is_plain else None


def _choice(g: Generation, text: str, entries: Columns, finish: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "index": g.index,
        "text": text,
        "logprobs": g.logprob_fields(entries) or None,
        "finish_reason": finish["type"] if finish else None,
        "matched_stop": matched_stop(finish),
    }


def _num_generated(req: CompletionRequest) -> int:
    """Sequences of each prompt."""
    return max(req.best_of or 1, req.n or 1)


def _check(req: CompletionRequest, is_text: bool) -> None:
    """Raises InputError: fields that exclude each other."""
    if req.best_of is not None and req.best_of < (req.n or 1):
        raise InputError.at("best_of", f"{req.best_of} sequences are fewer than n ({req.n}); raise it")
    if req.stream and _num_generated(req) > (req.n or 1):
        raise InputError.at("best_of", "above n not in a stream; leave out stream or best_of")
    if req.suffix and not is_text:
        raise InputError.at("suffix", "needs a prompt of text, not of token ids")
    if req.suffix and req.echo:
        raise InputError.at("suffix", "cannot be combined with echo; leave one out")
