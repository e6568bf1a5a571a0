"""Requests of the frontend until the scheduler has them: conversion, grammars that must be compiled, late masks."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from moe_engine.core import messages
from moe_engine.core.bad_words import BadWords
from moe_engine.core.deltas import DeltaSender
from moe_engine.core.grammar_queue import GrammarQueue, grammar_of
from moe_engine.core.late_masks import LateMasks, PositionMasks
from moe_engine.core.thinking_budget import ThinkingBudget
from moe_engine.errors import InputError
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.structured_output.backend import CompiledGrammar
from moe_engine.structured_output.compiler import GrammarCompiler
from moe_engine.types import FinishReason, LogprobSpec, Request, SamplingParams


class RequestReceiver:
    """
    Args:
        output: gets the final events of requests that are refused or aborted.
        eos_token_ids: of the model.
        grammars: compiles the constraints of requests; None: such requests are refused.
        wake: ends a wait of the core's loop; called from a compiler's thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        late_masks: LateMasks,
        output: DeltaSender,
        eos_token_ids: frozenset[int],
        grammars: GrammarCompiler | None,
        wake: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._late_masks = late_masks
        self._output = output
        self._eos = eos_token_ids
        self._grammars = GrammarQueue(grammars, wake)

    def __len__(self) -> int:
        """Requests whose grammars are being compiled."""
        return len(self._grammars)

    def add(self, message: messages.AddRequest) -> None:
        try:
            request = self._request(message)
        except msgspec.ValidationError as error:
            self._refuse(message.rid, InputError(f"sampling_params: {error}"))
            return
        if request.sampling.constraint is None:
            self._enter(request)
            return
        request.queued_at = self._scheduler.clock()
        try:
            grammar = self._grammars.add(request)
        except InputError as error:
            self._refuse(message.rid, error)
            return
        if grammar is not None:
            self._enter(request, grammar)

    def abort(self, rids: list[str] | None, reason: FinishReason) -> None:
        """Ends these requests (None: all), in the scheduler or before it."""
        if self._grammars and (gone := self._grammars.abort(rids)):
            self._output.send([messages.RequestDelta(rid, [], reason.to_dict()) for rid in gone])
        scheduler = self._scheduler
        self._output.publish(scheduler.abort_all(reason) if rids is None else scheduler.abort(rids, reason))

    def abort_overdue(self) -> None:
        """Ends the requests over a time limit. Those whose grammars are being compiled count as waiting."""
        for rids, reason in self._scheduler.overdue(self._grammars.requests()):
            self.abort(rids, reason)

    def enter_ready(self) -> None:
        """Passes on the requests whose grammars are compiled."""
        if not self._grammars:
            return
        for request, future in self._grammars.take():
            try:
                grammar = grammar_of(request, future)
            except InputError as error:
                self._refuse(request.rid, error)
                continue
            self._enter(request, grammar)

    def _enter(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        try:
            self._output.publish(self._scheduler.add(request))
        except InputError as error:
            self._refuse(request.rid, error)
            return
        sampling = request.sampling
        if sampling.needs_late_masks:
            masks: list[PositionMasks] = []
            if sampling.bad_word_ids:
                masks.append(BadWords(sampling.bad_word_ids))
            if sampling.thinking_tags is not None and sampling.max_thinking_tokens is not None:
                start, end = sampling.thinking_tags
                masks.append(ThinkingBudget(sampling.max_thinking_tokens, None if start < 0 else start, end))
            if grammar is not None and sampling.constraint is not None:
                masks.append(grammar.matcher(sampling.constraint.reasoning))
            self._late_masks.add(request, *masks)

    def _refuse(self, rid: str, error: InputError) -> None:
        finish = FinishReason("abort", message=error.message, status_code=error.status)
        self._output.send([messages.RequestDelta(rid, [], finish.to_dict())])

    def _request(self, message: messages.AddRequest) -> Request:
        logprobs = None
        if message.return_logprob:
            logprobs = LogprobSpec(message.logprob_start, message.top_logprobs, tuple(message.token_ids_logprob))
        return Request(
            rid=message.rid,
            prompt_ids=message.prompt_ids,
            sampling=msgspec.convert(message.sampling, SamplingParams),
            max_new_tokens=message.max_new_tokens,
            eos_token_ids=self._eos,
            priority=message.priority,
            arrival=message.arrival or time.monotonic(),
            logprobs=logprobs,
            extra_key=message.extra_key,
            lora_id=message.lora_id,
            lora_key=message.lora_key,
            lora_pinned=message.lora_pinned,
            bootstrap=message.bootstrap,
            positions=[] if message.return_hidden_states or message.return_routed_experts else None,
            computes_all=message.return_hidden_states,
            seed=message.seed,
            images=tuple(message.images),
            output_ids=list(message.generated_ids),
            retractions=int(message.num_migrations),
        )
