"""A stand-in for the engine process: scripted tokens, delays and failures behind the real `EngineClient` interface."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from moe_engine.core.messages import AddRequest, RequestDelta
from moe_engine.core.rank_calls import RankAnswer
from moe_engine.errors import EngineDeadError, InputError
from moe_engine.frontend.client_api import NO_ARGS, CallArgs, DirectReader, EngineInfo, GroupAnswers, Health, values_of
from moe_engine.frontend.inbox import is_plain
from moe_engine.models.config_sections.pooling import PoolingConfig
from moe_engine.types import PackedLogprobs
from tests.logprobs import Entry, pack
from tests.tokenizer.tiny_tokenizer import SPECIALS, make_tokenizer

INFO = EngineInfo(
    model_path="/models/tiny",
    served_model_name="tiny",
    model_type="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    vocab_size=make_tokenizer().vocab_size,
    context_len=256,
    max_total_num_tokens=1024,
    max_req_input_len=250,
    max_running_requests=8,
    eos_token_ids=(SPECIALS.index("<｜end▁of▁sentence｜>"),),
    page_size=1,
    dtype="float32",
)

POOLING = PoolingConfig("last", False, width=4)


def clients_id(request: AddRequest) -> str:
    """The client's id: the engine's internal id has a number appended."""
    return request.rid.rpartition("-")[0]


class FakeClient:
    """Answers every request with `script(request)`, `per_step` tokens at a time; EOS ends it.

    `delay` seconds pass before each step. `fail_after`: number of steps of a request before the engine dies. `refuse`:
    the finish of an aborted request, sent at once. `mute`: no output is ever sent.
    """

    def __init__(self, text: str = "Hello world, how are you today?", **info: Any) -> None:
        self.info = replace(INFO, **info)
        self.tokenizer = make_tokenizer()
        self.script: Callable[[AddRequest], list[int]] = lambda _: (
            self.tokenizer.encode(text, False) + [self.info.eos_token_ids[0]]
        )
        self.vector: Callable[[AddRequest], array[float]] = lambda request: array(
            "f", [len(request.prompt_ids), 2.0, 3.0, *request.prompt_ids[:1]]
        )
        """Of a pooled model."""
        self.per_step = 1
        self.delay = 0.0
        self.fail_after: int | None = None
        self.refuse: dict[str, Any] | None = None
        self.refuse_after = 0
        """Steps before the refusal."""
        self.mute = False
        self.rank_calls: list[tuple[str, dict[str, Any]]] = []
        self.rank_values: dict[str, Any] = {}
        """The rank's result, by method."""
        self.requests: list[AddRequest] = []
        self.running: set[str] = set()
        self.closed_early: list[str] = []
        self.aborts: list[str] = []
        self.state: Any = {
            "last_gen_throughput": 12.5,
            "cache_hit_rate": 0.25,
            "num_retracted": 3,
            "num_retractions_total": 5,
            "num_preemptions_total": 4,
            "num_incoming_transfers": 6,
            "failed_transfers_total": 7,
            "waiting_timeouts_total": 3,
            "running_timeouts_total": 2,
        }
        self.idle = True
        self.board = Health(True, True, 7, 0.0, 0.0, 0, 0, 0)

    async def stream(self, request: AddRequest, direct: DirectReader | None = None) -> AsyncIterator[RequestDelta]:
        if request.routed_dp_rank not in (None, 0):
            words = f"routed_dp_rank {request.routed_dp_rank}: this server has one data-parallel rank, 0"
            raise InputError(words, field="routed_dp_rank")
        self.requests.append(request)
        self.running.add(request.rid)
        finished = False
        try:
            async for delta in self._deltas(request):
                finished = delta.finish is not None
                if direct is None or not (is_plain(delta) and direct(delta)):
                    yield delta
        finally:
            self.running.discard(request.rid)
            if not finished:
                self.closed_early.append(clients_id(request))

    async def _deltas(self, request: AddRequest) -> AsyncIterator[RequestDelta]:
        if self.refuse is not None and not self.refuse_after:
            yield RequestDelta(request.rid, [], self.refuse)
            return
        if self.mute:
            await asyncio.Event().wait()
        if self.info.pooling is not None:
            finish = {"type": "length", "length": 0}
            yield RequestDelta(request.rid, [], finish, cached_tokens=2, vector=self.vector(request).tobytes())
            return
        tokens = self.script(request)
        prompt_logprobs = None
        if request.return_logprob and request.logprob_start is not None:
            prompt_logprobs = self._logprobs(
                request, request.prompt_ids[request.logprob_start :], first=request.logprob_start == 0
            )
        sent = 0
        ends = (*self.info.eos_token_ids, *request.sampling["stop_token_ids"])
        step = 0
        while True:
            await asyncio.sleep(self.delay)
            if self.fail_after is not None and step >= self.fail_after:
                raise EngineDeadError("engine core (pid 4242) was killed by SIGKILL")
            if self.refuse is not None and step >= self.refuse_after:
                yield RequestDelta(request.rid, [], self.refuse)
                return
            step += 1
            ids: list[int] = []
            finish: dict[str, Any] | None = None
            while len(ids) < self.per_step and finish is None:
                ids.append(tokens[sent % len(tokens)])
                sent += 1
                if ids[-1] in ends and not request.sampling["ignore_eos"]:
                    finish = {"type": "stop", "matched": ids[-1]}
                elif sent >= request.max_new_tokens:
                    finish = {"type": "length", "length": sent}
            logprobs = self._logprobs(request, ids) if request.return_logprob else None
            yield RequestDelta(request.rid, ids, finish, logprobs, prompt_logprobs, cached_tokens=2, queue_time=0.25)
            prompt_logprobs = None
            if finish is not None:
                return

    def _logprobs(self, request: AddRequest, tokens: list[int], *, first: bool = False) -> PackedLogprobs:
        """`first`: the first token is the prompt's, without log-probabilities."""
        best, asked = request.top_logprobs, len(request.token_ids_logprob)
        vocab = self.info.vocab_size
        entries = [
            Entry(t, -0.5, tuple(((t + i) % vocab, -0.5 - i) for i in range(best)), (-3.0,) * asked) for t in tokens
        ]
        if first:
            entries[0] = Entry(tokens[0], None)
        return pack(entries, best, asked)

    def abort(self, rids: Sequence[str], reason: str = "Aborted") -> None:
        self.aborts += [clients_id(request) for request in self.requests if request.rid in rids]

    async def call(self, method: str, **args: Any) -> list[Any]:
        if method == "flush_cache":
            return [self.idle]
        if method == "settings":
            return [{"values": {"max_running_requests": 8}, "bounds": {"max_running_requests": [1, 8]}}]
        return self.state if isinstance(self.state, list) else [self.state]

    async def ask_ranks(self, method: str, args: CallArgs = NO_ARGS, deadline: float = 1.0) -> list[GroupAnswers]:
        self.rank_calls.append((method, dict(args(None) if callable(args) else args)))
        return [GroupAnswers(None, [RankAnswer(0, self.rank_values.get(method))])]

    async def collective_rpc(self, method: str, args: CallArgs = NO_ARGS, deadline: float = 1.0) -> list[Any]:
        return values_of(await self.ask_ranks(method, args, deadline), method)

    async def call_one(self, method: str, **args: Any) -> Any:
        return (await self.call(method, **args))[0]

    def health(self) -> Health:
        return replace(self.board, num_running=max(self.board.num_running, len(self.running)))

    def healths(self) -> list[Health]:
        return [self.health()]

    def stop_stalled(self, stall: Callable[[Health], str | None]) -> None: ...

    async def shutdown(self, *, drain: bool = True) -> None: ...
