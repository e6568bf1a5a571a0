"""Preparation of requests: checks and tokenizes a client's request, resolves its limits, builds its sequences.

Invalid requests are refused here, before they are sent to the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from moe_engine.core.messages import AddRequest
from moe_engine.errors import InputError
from moe_engine.frontend.client_api import EngineInfo
from moe_engine.frontend.disaggregated import apply_mode
from moe_engine.frontend.encoding import Encoding, check_dimensions, check_kind
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.generation import Generation, OutputForm, Place
from moe_engine.frontend.grammar_checks import GrammarChecks
from moe_engine.frontend.hidden_states import NOT_ENABLED, HiddenStates
from moe_engine.frontend.image_prompts import ImagePrompts, engine_ids
from moe_engine.frontend.logits_fields import complete_sampling, thinking_tags
from moe_engine.frontend.logprob_format import LogprobFormat, LogprobOptions, PythonLogprobs
from moe_engine.frontend.prompt_checks import PromptChecks, too_long
from moe_engine.frontend.prompts import Prompt, split_prompts
from moe_engine.frontend.reasoning_count import count_of
from moe_engine.frontend.routed_experts import NOT_ENABLED as NO_EXPERTS
from moe_engine.frontend.routed_experts import TokenExperts
from moe_engine.frontend.seeds import Seeds
from moe_engine.frontend.sessions import Sessions
from moe_engine.frontend.settings import FrontendSettings
from moe_engine.structured_output.check_process import CheckSpec
from moe_engine.tokenizer.reasoning import REASONING_FORMATS
from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.types.constraint import Constraint, FreeReasoning

BULK = (
    "text", "input_ids", "sampling_params", "rid", "extra_key", "cache_salt", "token_ids_logprob",
    "top_logprobs_num", "custom_logit_processor", "lora_path", "session_params", "bootstrap_host", "bootstrap_port",
    "bootstrap_room", "image_data",
)  # fmt: skip
"""Fields of a request that its prompts hold."""
FormatOf = Callable[[LogprobOptions], LogprobFormat]
ChooseAdapter = Callable[[str | None, str | None], str | None]
"""The LoRA adapter of (`model`, `lora_path`), see `ServedAdapters.choose`."""

THREAD_CHARS = 4096
"""Requests with more text or token ids are read in a thread, so that they do not block other requests."""
BURST = 64
"""Sequences of one request handled in a row before yielding to health probes and other requests."""


@dataclass(slots=True)
class ReadRequest:
    """A request with checked and tokenized prompts; independent of other requests.

    `inp` lacks the fields that became `prompts`. `is_batch`: the client sent a list of prompts.
    """

    inp: GenerateInput
    prompts: list[Prompt]
    is_batch: bool


@dataclass(slots=True)
class Job:
    """A checked request, not yet started. `is_list`: the response is a list (a batch, or n > 1)."""

    generations: list[Generation]
    is_list: bool
    stream: bool


class Preparer:
    """Builds the `Job` of a request, or refuses it.

    Args:
        info: the engine's limits.
        tokenizer: None with `--skip-tokenizer-init`.
        settings: the operator's choices.
        choose: the adapter of a prompt.
        sessions: earlier requests that a prompt may continue.
    """

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        settings: FrontendSettings,
        choose: ChooseAdapter,
        sessions: Sessions,
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._settings = settings
        self._choose = choose
        self._sessions = sessions
        self._checks = PromptChecks(info, tokenizer, settings)
        self._seeds = Seeds(settings.random_seed)
        self.images = ImagePrompts(info, settings.media, tokenizer)
        self.grammar_checks = GrammarChecks(_check_spec(info, tokenizer, settings))
        self._numbers = itertools.count(1)

    async def prepare(self, inp: GenerateInput) -> Job:
        """Checks a request, tokenizes it and resolves its limits.

        Raises:
            InputError: names the field at fault and the fix.
        """
        if _size(inp) > THREAD_CHARS:
            return await self.begin(await asyncio.to_thread(self.read, inp))
        return await self.begin(self.read(inp))

    def read(self, inp: GenerateInput) -> ReadRequest:
        """The part of `prepare` that costs time proportional to the request's size. May run in any thread or process.

        Raises:
            InputError: names the field at fault and the fix.
        """
        settings = self._settings
        check_kind(self._info, pooled=inp.pooled)
        check_dimensions(self._info, inp.dimensions)
        self._checks.priority(inp)
        prompts, is_batch = split_prompts(inp, settings.preferred_sampling_params, settings.max_sequences)
        self._checks.logprobs(inp, prompts)
        if not settings.enable_return_hidden_states and any(prompt.hidden for prompt in prompts):
            raise InputError.at("return_hidden_states", NOT_ENABLED)
        if not settings.enable_return_routed_experts and any(prompt.routed for prompt in prompts):
            raise InputError.at("return_routed_experts", NO_EXPERTS)
        self._tokenize(inp, prompts)
        self._checks.total(inp, prompts)
        custom = settings.enable_custom_logit_processor
        complete_sampling(prompts, self._tokenizer, inp.sampling_field, custom=custom)
        self._add_reasoning(inp, prompts)
        for i, prompt in enumerate(prompts):
            where = inp.ids_field if prompt.text is None else inp.text_field
            self.images.check(prompt.ids, prompt.sources, prompt.session is not None, where)
            if prompt.session is None and not prompt.sources:  # else in `begin`, with the tokens of session or images
                self._checks.prompt(inp, prompt, f"{inp.ids_field}[{i}]" if is_batch else inp.ids_field)
        if inp.bootstrap_room is not None:
            apply_mode(settings.disaggregation_mode, prompts)
        return ReadRequest(msgspec.structs.replace(inp, **dict.fromkeys(BULK)), prompts, is_batch)

    async def begin(self, read: ReadRequest, logprob_format: FormatOf | None = None) -> Job:
        """Builds the sequences of a request. `logprob_format`: None means Python objects in SGLang's shape."""
        formats = logprob_format or self._python_logprobs
        self._continue_sessions(read)
        seeds = self._seeds.draw(read.prompts)  # before the first await: they depend only on the order of requests
        if any(prompt.sources for prompt in read.prompts):
            await self._place_images(read)
        await self._check_grammars(read.prompts)
        generations: list[Generation] = []
        for prompt_index, prompt in enumerate(read.prompts):
            adapter = self._choose(read.inp.model, prompt.lora)
            for copy in range(prompt.sampling.n):
                index = len(generations)
                rid = prompt.rid if prompt.sampling.n == 1 else f"{prompt.rid}_{copy}"
                request = self._request(read.inp, prompt, rid, copy, seeds[index])
                one = self._generation(read.inp, prompt, request, Place(rid, index, prompt_index), formats)
                one.lora, one.session = adapter, prompt.joined
                one.shows_prompt = bool(read.inp.return_prompt_token_ids)
                one.reasoning = count_of(self._reasoning(read.inp), self._tokenizer)
                if prompt.hidden:
                    one.request.return_hidden_states = True
                    one.hidden = HiddenStates(self._info.hidden_size, len(prompt.ids))
                if prompt.routed:
                    one.request.return_routed_experts = True
                    one.experts = self._experts(read.inp.routed_experts_start_len or 0, len(prompt.ids))
                generations.append(one)
                if len(generations) % BURST == 0:
                    await asyncio.sleep(0)
        is_list = read.is_batch or len(generations) > 1
        return Job(generations, is_list, bool(read.inp.stream))

    def _experts(self, start: int, num_prompt: int) -> TokenExperts:
        if start > num_prompt:
            raise InputError.at("routed_experts_start_len", f"the prompt has {num_prompt} tokens")
        return TokenExperts(self._info.experts_width, num_prompt, start)

    def _continue_sessions(self, read: ReadRequest) -> None:
        """Puts the earlier tokens of its session before each prompt that has one, and checks the whole prompt."""
        joined = [prompt for prompt in read.prompts if prompt.session is not None]
        for prompt in joined:
            assert prompt.session is not None
            prompt.ids, prompt.joined = self._sessions.join(prompt.session, prompt.ids)
            self._checks.prompt(read.inp, prompt, read.inp.ids_field)
        if joined:
            self._checks.total(read.inp, read.prompts)

    async def _place_images(self, read: ReadRequest) -> None:
        """Reads the images of the prompts, and checks the prompts with their tokens."""
        inp = read.inp
        where = inp.ids_field if read.prompts[0].text is None else inp.text_field
        for prompt in await self.images.place_all(read.prompts, where):
            count = len(prompt.ids)
            self._checks.prompt(inp, prompt, where)
            if len(prompt.ids) < count:
                words = f"{count} tokens with its images are longer than this server takes, and images are not cut"
                raise InputError.at(where, f"{words}; send fewer or smaller images")
        self._checks.total(inp, read.prompts)

    async def _check_grammars(self, prompts: list[Prompt]) -> None:
        """Raises InputError if a constraint cannot be compiled, with the reason."""
        found: dict[Constraint, Constraint] = {}
        for prompt in prompts:
            given = prompt.sampling.constraint
            if given is None:
                continue
            if given not in found:
                found[given] = await self.grammar_checks.check(given)
            checked = found[given]
            if checked is not given:
                if (checked.where, checked.reasoning) != (given.where, given.reasoning):
                    checked = replace(given, kind=checked.kind, source=checked.source)
                prompt.prepared = checked

    def _reasoning(self, inp: GenerateInput) -> FreeReasoning | None:
        """The reasoning with which the outputs begin."""
        name = self._settings.reasoning_parser
        if not inp.require_reasoning:
            return inp.reasoning
        if name is None:
            raise InputError.at("require_reasoning", "needs a server with --reasoning-parser")
        return FreeReasoning(REASONING_FORMATS[name].start, REASONING_FORMATS[name].free_end, inside=True)

    def _add_reasoning(self, inp: GenerateInput, prompts: list[Prompt]) -> None:
        reasoning, name = self._reasoning(inp), self._settings.reasoning_parser
        for prompt in prompts:
            if prompt.sampling.max_thinking_tokens is not None:
                tags = thinking_tags(reasoning, name, self._tokenizer)
                prompt.sampling = replace(prompt.sampling, thinking_tags=tags)
        for prompt in prompts if reasoning is not None else ():
            if (constraint := prompt.sampling.constraint) is not None:
                prompt.sampling = replace(prompt.sampling, constraint=replace(constraint, reasoning=reasoning))

    def _tokenize(self, inp: GenerateInput, prompts: list[Prompt]) -> None:
        texts = [p.text for p in prompts if p.text is not None]
        if not texts:
            return
        if self._tokenizer is None:
            raise InputError.at(inp.text_field, "this server runs with --skip-tokenizer-init; send input_ids")
        if not self._settings.allow_auto_truncate:
            limit = self._info.context_len
            for text in texts:
                if (least := len(text) // self._tokenizer.max_token_chars) >= limit:
                    raise too_long(f"at least {least}", limit, inp.text_field)
        texts = [self.images.written(p.text, p.sources) for p in prompts if p.text is not None]
        for prompt, ids in zip(prompts, self._tokenizer.encode_batch(texts, inp.add_special_tokens), strict=True):
            if not ids:
                raise InputError.at(inp.text_field, "the prompt has no tokens; send some text")
            prompt.ids = ids

    def _request(self, inp: GenerateInput, prompt: Prompt, rid: str, copy: int, seed: int) -> AddRequest:
        """The engine's request of a copy of a prompt."""
        request = AddRequest(
            rid=f"{rid}-{next(self._numbers)}",  # unlike the client's id, never reused
            prompt_ids=engine_ids(prompt.ids, prompt.images),
            images=prompt.images,
            sampling=msgspec.to_builtins(prompt.sampling),
            max_new_tokens=0 if inp.pooled else max(1, prompt.max_new_tokens),
            seed=seed,
            priority=inp.priority,
            extra_key=prompt.extra_key,
            arrival=time.monotonic(),
            routed_dp_rank=inp.dp_rank,
            bootstrap=prompt.bootstrap if copy == 0 else None,
        )
        if prompt.prepared is not None:
            request.sampling["constraint"] = msgspec.to_builtins(prompt.prepared)
        if (options := prompt.logprobs) is not None:
            request.return_logprob = True
            request.logprob_start = options.start
            request.top_logprobs = options.top
            request.token_ids_logprob = list(options.token_ids)
        return request

    def _generation(
        self, inp: GenerateInput, prompt: Prompt, request: AddRequest, place: Place, formats: FormatOf
    ) -> Generation:
        sampling, observed = prompt.sampling, inp.log_metrics is not False
        if inp.pooled:
            encoding = Encoding(request, sampling, place, observed=observed)
            encoding.dimensions = inp.dimensions
            encoding.normalizes = self._info.pooling is not None and self._info.pooling.normalizes
            return encoding
        form = OutputForm(
            live=bool(inp.stream),
            interval=sampling.stream_interval or self._settings.stream_interval,
            no_output=prompt.max_new_tokens == 0,
            keep_special=inp.keep_special,
            keep_logprobs=not inp.stream or (inp.cumulative and not self._settings.incremental_streaming_output),
        )
        return Generation(
            request,
            sampling,
            place,
            tokenizer=self._tokenizer,
            form=form,
            logprobs=None if prompt.logprobs is None else formats(prompt.logprobs),
            prompt_text=prompt.text,
            prompt_ids=prompt.ids,
            observed=observed,
        )

    def _python_logprobs(self, options: LogprobOptions) -> LogprobFormat:
        return PythonLogprobs(options, self._tokenizer.token_text if self._tokenizer is not None else None)


def _check_spec(info: EngineInfo, tokenizer: Tokenizer | None, settings: FrontendSettings) -> CheckSpec | None:
    if tokenizer is None or tokenizer.source is None or settings.grammars.grammar_backend == "none":
        return None
    return CheckSpec(settings.grammars, tokenizer.source, info.vocab_size, info.eos_token_ids)


def _size(inp: GenerateInput) -> int:
    """Characters of the texts, or token ids; plus a constant per prompt of a batch."""
    given = inp.input_ids if inp.text is None else inp.text
    if isinstance(given, list):
        return sum(len(one) + 16 if isinstance(one, (str, list)) else 1 for one in given)
    return len(given) if isinstance(given, str) else 0
