"""Checks of a request's prompts against the engine's limits and the operator's settings. Errors name field and fix."""

from __future__ import annotations

from moe_engine.errors import InputError, TooLongError
from moe_engine.frontend.client_api import EngineInfo
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.prompts import Prompt, check_token_ids
from moe_engine.frontend.settings import FrontendSettings
from moe_engine.tokenizer.stop_regex import compiled
from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.types.constraint import Constraint


class PromptChecks:
    """Each check raises InputError for what must be refused.

    Args:
        tokenizer: None with `--skip-tokenizer-init`.
    """

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer | None, settings: FrontendSettings) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._settings = settings

    def priority(self, inp: GenerateInput) -> None:
        settings = self._settings
        if inp.priority is not None and settings.abort_on_priority_when_disabled and not settings.uses_priority:
            words = "priority scheduling is off (--enable-priority-scheduling), and this server refuses the field then"
            raise InputError.at("priority", f"{words}; leave it out")

    def logprobs(self, inp: GenerateInput, prompts: list[Prompt]) -> None:
        limit = self._settings.max_logprobs
        for options in {prompt.logprobs for prompt in prompts} if limit >= 0 else ():
            if options is None:
                continue
            for where, count in ((inp.top_logprobs_field, options.top), ("token_ids_logprob", len(options.token_ids))):
                if count > limit:
                    raise InputError.at(
                        where,
                        f"{count} log-probabilities per token exceed this server's limit of {limit}; "
                        "ask for fewer, or start it with a higher --max-logprobs",
                    )

    def total(self, inp: GenerateInput, prompts: list[Prompt]) -> None:
        limit, total = self._settings.max_prompt_tokens, sum(len(p.ids) * p.sampling.n for p in prompts)
        if limit is not None and total > limit:
            where = inp.ids_field if inp.text is None else inp.text_field
            raise InputError.at(
                where, f"{total} prompt tokens, counting all n copies; send at most {limit} in one request"
            )

    def prompt(self, inp: GenerateInput, prompt: Prompt, where: str) -> None:
        info = self._info
        if prompt.text is None:
            check_token_ids(prompt.ids, info.vocab_size, where)
        elif (token := max(prompt.ids, default=0)) >= info.vocab_size:
            raise InputError.at(
                inp.text_field,
                f"the tokenizer gives token id {token}, outside the model's vocabulary "
                f"[0, {info.vocab_size}): its files are of another model, or have tokens without weights",
            )
        _check_vocab(prompt, info.vocab_size, inp.sampling_field)
        sampling = prompt.sampling
        if (sampling.stop or sampling.stop_regex) and self._tokenizer is None:
            name = "sampling_params.stop" if sampling.stop else "sampling_params.stop_regex"
            raise InputError.at(
                name, "needs a tokenizer, and this server runs with --skip-tokenizer-init; use stop_token_ids"
            )
        for pattern in sampling.stop_regex:
            compiled(pattern, f"{inp.sampling_field}.stop_regex".lstrip("."))
        if prompt.sampling.constraint is not None:
            self._check_grammars_available(prompt.sampling.constraint)
        if prompt.logprobs is not None:
            check_token_ids(prompt.logprobs.token_ids or (0,), info.vocab_size, "token_ids_logprob")
        self._fit(prompt, inp.max_tokens_field, where if prompt.text is None else inp.text_field)
        if prompt.logprobs is not None and (prompt.logprobs.start or 0) > len(prompt.ids):
            raise InputError.at(
                "logprob_start_len", f"{prompt.logprobs.start} is beyond the prompt ({len(prompt.ids)} tokens)"
            )

    def _check_grammars_available(self, constraint: Constraint) -> None:
        missing = None
        if self._settings.grammars.grammar_backend == "none":
            missing = "is not available: this server runs with --grammar-backend none"
        elif self._tokenizer is None:
            missing = "needs a tokenizer, and this server runs with --skip-tokenizer-init"
        if missing is not None:
            raise InputError.at(constraint.where, missing)

    def _fit(self, prompt: Prompt, where: str, prompt_field: str) -> None:
        """Resolves `max_new_tokens`. A default is reduced to the free space. A client's value that does not fit is
        refused, or with --allow-auto-truncate reduced like the prompt. `where`, `prompt_field`: the client's names of
        the two fields."""
        info = self._info
        truncate = self._settings.allow_auto_truncate
        room = min(info.context_len, info.max_total_num_tokens // info.page_size * info.page_size)
        longest = max(1, min(info.max_req_input_len, room - 1))
        if truncate and len(prompt.ids) > longest:
            prompt.ids = prompt.ids[:longest]
        count, wanted = len(prompt.ids), prompt.sampling.max_new_tokens
        if count >= info.context_len:
            raise too_long(str(count), info.context_len, prompt_field)
        if count > longest:
            raise TooLongError(
                f"Input length ({count} tokens) exceeds the maximum allowed length ({longest} tokens). "
                "Use a shorter input or enable --allow-auto-truncate.",
                field=prompt_field,
            )
        prompt.max_new_tokens = room - count if wanted is None else wanted
        if truncate or not prompt.length_asked:
            prompt.max_new_tokens = min(prompt.max_new_tokens, room - count)
        if count + prompt.max_new_tokens > info.context_len:
            raise TooLongError(
                f"Requested token count exceeds the model's maximum context length of {info.context_len} tokens. You "
                f"requested a total of {count + prompt.max_new_tokens} tokens: {count} tokens from the input messages "
                f"and {prompt.max_new_tokens} tokens for the completion. Please reduce the number of tokens in the "
                "input messages or the completion to fit within the limit.",
                field=where,
            )
        if count + prompt.max_new_tokens > room:
            raise TooLongError(
                f"The input ({count} tokens) and max_new_tokens ({prompt.max_new_tokens}) together exceed the KV cache "
                f"({room} tokens): the request could never finish. Lower max_new_tokens to {room - count}, or start "
                "the server with a higher --mem-fraction-static or --max-total-tokens.",
                field=where,
            )


def _check_vocab(prompt: Prompt, vocab_size: int, where: str) -> None:
    """Checks the sampling parameters' token ids; `where` is "" if the fields are at the top level."""
    try:
        prompt.sampling.check_vocab(vocab_size, prefix=where)
    except InputError as exc:
        raise InputError(exc.message.lstrip("."), field=(exc.field or "").lstrip(".")) from None


def too_long(count: str, limit: int, field: str) -> TooLongError:
    return TooLongError(
        f"The input ({count} tokens) is longer than the model's context length ({limit} tokens). "
        f"Shorten {field}, or start the server with --allow-auto-truncate.",
        field=field,
    )
