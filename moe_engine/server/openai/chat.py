"""/v1/chat/completions endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moe_engine.errors import InputError
from moe_engine.frontend.encoding import check_kind
from moe_engine.frontend.frontend import Job
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.generation import Generation, Piece
from moe_engine.frontend.logprob_format import Columns
from moe_engine.media.settings import ImageSource
from moe_engine.sampling_checks import constrained
from moe_engine.server.bodies import Plan
from moe_engine.server.errors import openai_body
from moe_engine.server.event_stream import EventStream
from moe_engine.server.http_io import cancel_on_disconnect, decode_body_and_rest, encode_json, json_response
from moe_engine.server.openai.answers import Usage
from moe_engine.server.openai.choice import ChoiceParser, Enforced, ParserOptions, parser_options
from moe_engine.server.openai.common import head_of, last_hidden_state, matched_stop, usage_of
from moe_engine.server.openai.events import PLAIN_END, ChunkEvents
from moe_engine.server.openai.extras import NO_FIELDS, ChoiceExtras, answer_extras
from moe_engine.server.openai.images import take_images
from moe_engine.server.openai.messages import render_prompt
from moe_engine.server.openai.tools import ToolWish, tool_wish
from moe_engine.server.openai.types import ChatRequest, generate_input, response_fields
from moe_engine.server.state import ServerState
from moe_engine.tokenizer.reasoning import free_reasoning
from moe_engine.tokenizer.tool_calls import TOOL_FORMATS
from moe_engine.tokenizer.tool_calls.counted_ids import num_calls
from moe_engine.types import SamplingParams
from moe_engine.types.constraint import Constraint


class ChatApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def chat_completions(self, request: Request) -> Response:
        """Chat completion."""
        plan = await self._state.bodies.plan(request, "chat_completions")
        req, model, parsers = plan.options
        begun = self._state.frontend.begin(plan.read, self._state.token_json_of(req).chat)
        job = await cancel_on_disconnect(request, begun)
        if req.stream:
            usage = partial(self._usage, parsers=parsers)
            head = head_of(job, model, "chat.completion.chunk")
            events = _Events(parsers, req, job, head, usage, self._state.flags)
            return EventStream(self._state.frontend, job, events, openai_body)
        await cancel_on_disconnect(request, self._state.frontend.collect(job))
        return json_response(self._answer(req, job, model, parsers))

    def read(self, body: bytes | bytearray) -> Plan:
        """`Plan.options`: the request without the prompt's fields, the model's name, `ParserOptions`."""
        check_kind(self._state.client.info, pooled=False)
        req, whole = decode_body_and_rest(body, ChatRequest)
        return self.plan(req, whole["messages"], whole.get("tools") or [])

    def plan(
        self,
        req: ChatRequest,
        messages: list[dict[str, Any]],
        offered: list[dict[str, Any]],
        *,
        reduce_length: bool = False,
    ) -> Plan:
        """Like `read`. `messages`, `offered`: with the fields that the types lack. `reduce_length`: `max_tokens` is
        reduced to the space after the prompt instead of refused."""
        model = self._state.response_model(req.model)
        self._state.tokenizer()
        tools = tool_wish(req, offered, self._state.flags.tool_call_parser)
        messages, images = take_images(self._state, messages)
        if req.input_ids is None:
            prompt = self._prompt(req, messages, tools)
        else:
            prompt = self._given_prompt(req.input_ids, images)
        inp = self._input(req, prompt)
        inp.image_data = images or None
        inp.max_tokens_asked = not reduce_length
        enforced, before = self._enforce(inp, tools, req), num_calls(messages)
        parsers = parser_options(self._state, req, prompt, tools.called, enforced, before)
        inp.keep_special = parsers.keep_special
        read = self._state.frontend.read(inp)
        return Plan(read, (response_fields(req, messages=[]), model, parsers))

    def num_tokens(self, req: ChatRequest, messages: list[dict[str, Any]], offered: list[dict[str, Any]]) -> int:
        """Tokens of the prompt of `plan`, of any length, without those of images."""
        tokenizer, tools = self._state.tokenizer(), tool_wish(req, offered, self._state.flags.tool_call_parser)
        prompt = self._prompt(req, take_images(self._state, messages)[0], tools)
        return sum(len(ids) for _, ids in tokenizer.encode_parts([prompt], False))

    def _prompt(self, req: ChatRequest, messages: list[dict[str, Any]], tools: ToolWish) -> str:
        effort = None if req.reasoning_effort is None else {"reasoning_effort": req.reasoning_effort}
        return render_prompt(self._state, messages, req, tools.offered, effort)

    def _given_prompt(self, ids: list[int], images: Sequence[ImageSource]) -> str:
        """The text of a prompt of token ids, for the parsers of its output."""
        if images:
            raise InputError.at("input_ids", "cannot be combined with images; leave one out")
        tokenizer = self._state.tokenizer()
        if (top := max(ids)) >= tokenizer.vocab_size:
            raise InputError.at("input_ids", f"{top} is not a token id; the vocabulary has {tokenizer.vocab_size}")
        return tokenizer.decode(ids, skip_special_tokens=False)

    def _input(self, req: ChatRequest, prompt: str) -> GenerateInput:
        if req.top_logprobs and not req.logprobs:
            raise InputError.at("top_logprobs", "needs logprobs: true")
        inp = generate_input(
            req,
            {**self._state.settings.sampling_defaults, "max_new_tokens": None},
            "max_tokens" if req.max_completion_tokens is None else "max_completion_tokens",
            text=prompt if req.input_ids is None else None,
            input_ids=req.input_ids,
            text_field="messages",
            add_special_tokens=bool(req.add_special_tokens),
            return_logprob=req.logprobs,
            top_logprobs_num=req.top_logprobs,
            top_logprobs_field="top_logprobs",
        )
        name = self._state.flags.reasoning_parser
        if name is not None:
            inp.reasoning = free_reasoning(
                name, prompt, self._state.template_arguments(req.chat_template_kwargs), bool(req.continue_final_message)
            )
            if inp.reasoning is None and isinstance(inp.sampling_params, SamplingParams):  # nothing to limit
                inp.sampling_params = replace(inp.sampling_params, max_thinking_tokens=None)
        return inp

    def _enforce(self, inp: GenerateInput, tools: ToolWish, req: ChatRequest) -> Enforced:
        """Adds the constraint of the tool calls, if they are enforced."""
        given: Constraint | None = inp.sampling_params.constraint
        form = self._state.flags.tool_call_parser
        constraint = tools.constraint(form, given)
        if constraint is given or constraint is None:
            return Enforced()
        if inp.reasoning is not None and req.separate_reasoning is False:
            raise InputError.at(
                "separate_reasoning", f"false cannot be combined with {constraint.where}; leave one out"
            )
        other = TOOL_FORMATS[form].reasoning_end if form and given is None else ""
        if inp.reasoning is not None and other:
            inp.reasoning = replace(inp.reasoning, end=other)
        inp.sampling_params = constrained(inp.sampling_params, constraint, names={"min_new_tokens": "min_tokens"})
        return Enforced(calls=True, content=given is not None)

    def _usage(self, generations: list[Generation], parsers: ParserOptions) -> Usage:
        return usage_of(
            generations,
            cache_report=self._state.flags.enable_cache_report,
            reasoning_tokens=sum(parsers.count_reasoning(g.output_ids) for g in generations),
        )

    def _answer(self, req: ChatRequest, job: Job, model: str, parsers: ParserOptions) -> dict[str, Any]:
        choices, extras = [], ChoiceExtras(req)
        for g in job.generations:
            parser = ChoiceParser(parsers)
            message = parser.whole(g.text, g.beginnings)
            choices.append(
                {
                    "index": g.index,
                    "message": message,
                    "logprobs": g.logprob_fields(g.output_logprobs),
                    "finish_reason": parser.finish_reason(g.finish),
                    "matched_stop": matched_stop(g.finish),
                    **last_hidden_state(g),
                    **extras.whole(g),
                }
            )
        return head_of(job, model, "chat.completion") | {
            "choices": choices,
            "usage": self._usage(job.generations, parsers),
            "metadata": {"weight_version": job.generations[0].weight_version},
            **extras.chat_prompt(job.generations[0]),
            **answer_extras(req, self._state.flags, job.generations),
        }


_NO_TEXT = {"content": None, "reasoning_content": None}
"""Every delta has both fields, as in SGLang's and DeepSeek's streams: their examples read them from each."""


class _Events(ChunkEvents):
    def __init__(self, parsers: ParserOptions, *chunks: Any) -> None:
        super().__init__(*chunks)
        self._parsers = parsers
        self._choices: dict[int, tuple[ChoiceParser, bytes]] = {}
        """By index of the sequence: its parser, and a plain event up to its delta."""

    def of(self, piece: Piece) -> bytes:
        g, entries, finish = piece.generation, piece.logprobs, piece.finish
        ids = piece.token_ids if self._extras.has_ids else None
        found, events = self._choices.get(g.index), b""
        if found is None:
            found = self._choices[g.index] = ChoiceParser(self._parsers), self._plain_start(g, b"delta")
            start = {"role": "assistant", "content": ""}
            events = self._event(g, start, more=self._extras.begin(g), top=self._extras.chat_prompt(g))
        parser, before = found
        deltas = parser.push(piece.text)
        if finish is not None:
            deltas += parser.finish(g.beginnings)
        elif self._is_plain and not entries:
            for delta in deltas:
                events += before + encode_json(_NO_TEXT | delta) + PLAIN_END
            return events
        if (entries or ids) and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            events += self._event(g, delta, entries=entries, more=self._extras.ids(ids) if ids else NO_FIELDS)
            entries, ids = [], None
        if finish is None:
            return events
        return events + self._event(g, {}, parser.finish_reason(finish), more=self._extras.end(g))

    def around_text(self, generation: Generation) -> tuple[bytes, bytes] | None:
        found = self._choices.get(generation.index)
        if found is None or not self._is_plain or found[0].parses:
            return None
        return found[1] + b'{"content":', b',"reasoning_content":null}' + PLAIN_END

    def _event(
        self,
        g: Generation,
        delta: dict[str, Any],
        finish: str | None = None,
        entries: Columns | None = None,
        more: Mapping[str, Any] = NO_FIELDS,
        top: Mapping[str, Any] = NO_FIELDS,
    ) -> bytes:
        choice = {
            "index": g.index,
            "delta": _NO_TEXT | delta,
            "logprobs": g.logprob_fields(entries) if entries else None,
            "finish_reason": finish,
            "matched_stop": matched_stop(g.finish) if finish else None,
            **more,
        }
        return self._chunk(g, choice, top)
