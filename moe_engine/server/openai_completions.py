"""/v1/completions endpoint."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response

from moe_engine.errors import InputError
from moe_engine.frontend.frontend import Job
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.generation import Generation
from moe_engine.frontend.logprob_format import Columns, joined
from moe_engine.server.bodies import Plan
from moe_engine.server.errors import openai_body
from moe_engine.server.http_io import EventStream, cancel_on_disconnect, decode_body, json_response, sse
from moe_engine.server.openai_common import last_hidden_state, matched_stop, usage_of
from moe_engine.server.openai_types import DEFAULT_MAX_TOKENS, CompletionRequest, generate_input, response_fields
from moe_engine.server.state import ServerState


class CompletionsApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def completions(self, request: Request) -> Response:
        """Text completion."""
        plan = await self._state.bodies.plan(request, "completions")
        req, model = plan.options
        job = await self._state.frontend.begin(plan.read, self._state.token_json.completion)
        if req.stream:
            return EventStream(self._events(req, job, model), openai_body)
        await cancel_on_disconnect(request, self._state.frontend.collect(job))
        return json_response(self._answer(req, job, model))

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
        if req.best_of is not None and req.best_of > (req.n or 1):
            raise InputError(
                "best_of: values above n are not available yet in moe-engine; leave it out",
                field="best_of",
            )
        return generate_input(
            req,
            {**self._state.settings.sampling_defaults, "max_new_tokens": DEFAULT_MAX_TOKENS},
            "max_tokens",
            text=req.prompt if is_text else None,
            input_ids=None if is_text else req.prompt,
            text_field="prompt",
            ids_field="prompt",
            max_tokens_asked=req.max_tokens is not None,
            return_logprob=req.logprobs is not None,
            logprob_start_len=0 if req.echo else -1,
            top_logprobs_num=req.logprobs,
            top_logprobs_field="logprobs",
        )

    def _choice(self, g: Generation, text: str, entries: Columns, finish: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": g.index,
            "text": text,
            "logprobs": g.logprob_fields(entries),
            "finish_reason": finish["type"] if finish else None,
            "matched_stop": matched_stop(finish),
        }

    def _head(self, job: Job, model: str) -> dict[str, Any]:
        return {"id": job.generations[0].rid, "object": "text_completion", "created": int(time.time()), "model": model}

    def _answer(self, req: CompletionRequest, job: Job, model: str) -> dict[str, Any]:
        choices = []
        for g in job.generations:
            text, entries = g.text, g.output_logprobs
            if req.echo:
                text, entries = (g.prompt_text or "") + text, joined(g.prompt_logprobs, entries)
            choices.append(self._choice(g, text, entries, g.finish) | last_hidden_state(g))
        usage = usage_of(job.generations, cache_report=self._state.flags.enable_cache_report)
        return self._head(job, model) | {
            "choices": choices,
            "usage": usage,
            "metadata": {"weight_version": job.generations[0].weight_version},
        }

    async def _events(self, req: CompletionRequest, job: Job, model: str) -> AsyncGenerator[bytes]:
        head = self._head(job, model)
        report = self._state.flags.enable_cache_report
        options = req.stream_options
        continuous = options is not None and options.continuous_usage_stats
        begun: set[int] = set()
        async with aclosing(self._state.frontend.pieces(job)) as pieces:
            async for piece in pieces:
                g, text, entries = piece.generation, piece.text, piece.logprobs
                if g.index not in begun:
                    begun.add(g.index)
                    if req.echo:
                        text, entries = (g.prompt_text or "") + text, joined(g.prompt_logprobs, entries)
                if not (text or piece.finish or entries):
                    continue
                chunk = head | {"choices": [self._choice(g, text, entries, piece.finish)]}
                if continuous:
                    chunk["usage"] = usage_of([g], cache_report=report)
                yield sse(chunk)
        if options is not None and options.include_usage:
            yield sse(head | {"choices": [], "usage": usage_of(job.generations, cache_report=report)})
