"""Finish conditions of a request, and the check that it can run at all."""

from __future__ import annotations

from moe_engine.errors import InputError
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.types import FinishReason, Request, SamplingParams

_FORBIDDING = "allowed_token_ids", "bad_words", "min_new_tokens", "custom_logit_processor"


def take_tokens(request: Request, tokens: list[int], vocab_size: int | None) -> tuple[list[int], FinishReason | None]:
    """Appends new tokens up to the one that ends the request. Returns the appended tokens, and the reason if it ended.

    Order of the checks per token: an id outside the vocabulary (not appended), an end token, the length.
    """
    kept: list[int] = []
    outputs = request.output_ids
    for token in tokens:
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            if token < 0:
                return kept, _not_sampled(request.sampling)
            message = f"the model produced token id {token}, outside the vocabulary [0, {vocab_size})"
            return kept, FinishReason("abort", message=message, status_code=500)
        outputs.append(token)
        kept.append(token)
        if token in request.end_ids and len(outputs) > request.sampling.min_new_tokens:
            return kept, FinishReason("stop", matched=token)
        if len(outputs) >= request.max_new_tokens:
            return kept, FinishReason("length", length=len(outputs))
    return kept, None


def _not_sampled(sampling: SamplingParams) -> FinishReason:
    """Why no token was sampled. Processors, or ends below min_new_tokens, may forbid what the other fields allow."""
    fields = [name for name in _FORBIDDING if getattr(sampling, name)]
    if sampling.custom_logit_processor or (sampling.min_new_tokens and len(fields) > 1):
        if sampling.constraint is not None:
            fields.append(sampling.constraint.where.rpartition(".")[2] or sampling.constraint.kind)
        message = (
            f"no token can be sampled: {', '.join(fields)} of the request forbid every token; change one of them (if "
            "requests without them fail too, the model's logits are NaN)"
        )
        return FinishReason("abort", message=message, status_code=400)
    message = (
        "the model's logits are not finite numbers (NaN), so no token can be sampled: weights of the checkpoint may be "
        "damaged, or --dtype too narrow; try --dtype bfloat16 or float32"
    )
    return FinishReason("abort", message=message, status_code=500)


def check_fits(request: Request, config: SchedulerConfig) -> None:
    """Refuses a request that could never run; reduces `max_new_tokens` to what fits if the client left it open.

    Raises:
        InputError: with the numbers and the flag to raise.
    """
    prompt, new = len(request.prompt_ids), request.max_new_tokens
    if prompt == 0:
        raise InputError("the prompt is empty; send at least one token", field="input_ids")
    if new < 0:
        raise InputError.at("sampling_params.max_new_tokens", f"{new} is negative")
    if request.sampling.max_new_tokens is None:
        room = min(config.context_len, config.num_slots) - prompt
        if room >= 1:
            new = request.max_new_tokens = min(new, room)
    if prompt + new > config.context_len:
        raise InputError(
            f"The input ({prompt} tokens) and max_new_tokens ({new}) together are {prompt + new} tokens, longer than "
            f"the model's context length ({config.context_len} tokens). Shorten the input, lower max_new_tokens, or "
            "raise --context-length."
        )
    need = config.ceil_page(prompt + new)
    if need > config.num_slots:
        pages = f" (in pages of {config.page_size})" if config.page_size > 1 else ""
        raise InputError(
            f"The input ({prompt} tokens) and max_new_tokens ({new}) need {need} KV slots{pages}, but the pool has "
            f"only {config.num_slots}: the request could never finish. Shorten it, lower max_new_tokens, or raise "
            "--mem-fraction-static (or --max-total-tokens)."
        )


def end_ids(request: Request) -> frozenset[int]:
    """Stop token ids of the request; none with ignore_eos."""
    if request.sampling.ignore_eos:
        return frozenset()
    stops = request.sampling.stop_token_ids
    return request.eos_token_ids | frozenset(stops) if stops else request.eos_token_ids
