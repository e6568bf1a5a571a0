"""Scores of items for a query, SGLang's scoring API: `/v1/score` and the offline engine's `score`.

A model that generates text scores an item by the probabilities of label tokens after query and item; a classification
or reward model by the numbers of its head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from msgspec import Meta, Struct

from moe_engine.errors import InputError
from moe_engine.frontend.client_api import EngineInfo
from moe_engine.frontend.encoding import Encoding, aborted, encode_input
from moe_engine.frontend.frontend import Frontend
from moe_engine.frontend.generate_input import GenerateInput, Text
from moe_engine.frontend.generation import Generation
from moe_engine.frontend.prompts import check_token_ids
from moe_engine.sampling_checks import TokenId
from moe_engine.types import SamplingParams
from moe_engine.validation import NotAvailable, OffOnly, checked

_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, sampling_seed=0)
"""Log-probabilities are needed at the position after the prompt; the generated token is not part of the answer."""


class ScoreRequest(Struct, kw_only=True):
    """Query and items: all texts, or all lists of token ids."""

    items: Text | Annotated[list[Text | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
    query: Text | Annotated[list[TokenId], Meta(min_length=1)] | None = None
    label_token_ids: (
        Annotated[
            list[TokenId | list[TokenId]],
            Meta(description="required by models that generate text: of all items, or a list for each item"),
        ]
        | None
    ) = None
    apply_softmax: Annotated[bool, Meta(description="true: the scores of an item sum to 1")] | None = False
    item_first: bool | None = False
    model: Annotated[str | None, Meta(description="any name; base:adapter is refused")] = None
    temperature: Annotated[float, Meta(gt=0, description="divides the logits; needs apply_softmax")] | None = None
    return_token_logprobs: Annotated[
        bool | None, Meta(description="the labels' `token_logprobs`, among all tokens")
    ] = False
    return_pooled_hidden_states: OffOnly = None
    score_extraction_token: NotAvailable = None
    embed_override_token_id: NotAvailable = None
    query_embed_overrides: NotAvailable = None
    item_embed_overrides: NotAvailable = None

    def __post_init__(self) -> None:
        if self.temperature not in (None, 1.0) and not self.apply_softmax:
            _refuse("temperature", "scales the scores of a softmax; send apply_softmax true, or leave it out")


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """SGLang's answer. `scores`: of each item, one for each label or class; `prompt_tokens`: of all items."""

    scores: list[list[float]]
    prompt_tokens: int


async def score(
    frontend: Frontend, query: Any, items: Any, label_token_ids: Any, apply_softmax: Any, item_first: Any
) -> ScoreResult:
    """The scores of the offline engine, with the fields of `ScoreRequest`. No items have no scores, as in SGLang.

    Raises:
        InputError: names the invalid field, or the model has no scores.
    """
    if isinstance(items, list) and not items:
        return ScoreResult([], 0)
    fields = {"query": query, "items": items, "label_token_ids": label_token_ids}
    request = checked(fields | {"apply_softmax": apply_softmax, "item_first": item_first}, ScoreRequest)
    job = await frontend.prepare(score_input(request, frontend.client.info, frontend.settings.max_logprobs))
    generations = await frontend.collect(job)
    return ScoreResult(scores_of(generations, bool(request.apply_softmax)), sum(len(g.prompt_ids) for g in generations))


def score_input(req: ScoreRequest, info: EngineInfo, max_labels: int) -> GenerateInput:
    """The frontend's request. `max_labels`: --max-logprobs; negative: no limit."""
    texts, ids = _joined(req)
    prompts: dict[str, Any] = {"text": texts, "input_ids": ids, "text_field": "items", "ids_field": "items"}
    if info.pooling is None:
        return _label_input(req, prompts, info.vocab_size, max_labels)
    if req.return_token_logprobs:
        _refuse("return_token_logprobs", "this model scores its own classes; leave it out")
    if not info.pooling.head:
        raise InputError("/v1/score needs a model that generates text, or a classification or reward model")
    if req.label_token_ids is not None:
        _refuse("label_token_ids", "this model scores its own classes; leave it out")
    return encode_input(prompts)


def scores_of(
    generations: Sequence[Generation], apply_softmax: bool, temperature: float | None = None
) -> list[list[float]]:
    """The scores of finished generations: logits of classes; probabilities of the label tokens after the prompt, among
    all tokens. With `apply_softmax` probabilities among the classes or labels.

    Raises:
        InputError: 503, one was aborted.
    """
    rows = [generation.vector().tolist() for generation in generations if isinstance(generation, Encoding)]
    if not rows:
        rows = label_logprobs(generations)
        if not apply_softmax:
            return [[math.exp(value) for value in row] for row in rows]
    return [softmax([value / (temperature or 1) for value in row]) for row in rows] if apply_softmax else rows


def label_logprobs(generations: Sequence[Generation]) -> list[list[float]]:
    """Log-probabilities of the label tokens after each prompt, among all tokens. Raises InputError: see `scores_of`."""
    rows = []
    for generation in generations:
        positions = (generation.logprob_fields(generation.output_logprobs) or {}).get("token_ids_logprobs")
        if not positions:
            raise aborted(generation)
        rows.append([entry[0] for entry in positions[0]])
    return rows


def softmax(values: Sequence[float]) -> list[float]:
    most = max(values)
    if most == -math.inf:  # of no label
        return [0.0] * len(values)
    weights = [math.exp(value - most) for value in values]
    total = sum(weights)
    return [weight / total for weight in weights]


def _label_input(req: ScoreRequest, prompts: dict[str, Any], vocab_size: int, limit: int) -> GenerateInput:
    labels, num_prompts = req.label_token_ids, len(prompts["text"] or prompts["input_ids"])
    if not labels:
        _refuse("label_token_ids", "is required: the tokens whose probabilities are the scores")
    of_items: list[Any] = labels if isinstance(labels[0], list) else [labels] * num_prompts
    if len(of_items) != num_prompts:
        _refuse("label_token_ids", f"has {len(of_items)} lists for {num_prompts} items; send one list, or one for each")
    for i, ids in enumerate(of_items):
        if not isinstance(ids, list) or not ids or any(isinstance(token, list) for token in ids):
            _refuse(f"label_token_ids[{i}]", "expected token ids, all in one list or in a list for each item")
        if 0 <= limit < len(ids):
            _refuse("label_token_ids", f"{len(ids)} exceed this server's limit of {limit} (--max-logprobs)")
        check_token_ids(ids, vocab_size, "label_token_ids")
    return GenerateInput(
        **prompts, sampling_params=_ONE_TOKEN, return_logprob=True, token_ids_logprob=[list(ids) for ids in of_items]
    )


def _joined(req: ScoreRequest) -> tuple[list[str] | None, list[list[int]] | None]:
    """Query and item of each prompt, as texts or as token ids."""
    items: list[Any] = [req.items] if isinstance(req.items, str) else list(req.items)
    given = [] if req.query is None else [req.query]
    kinds = {type(value) for value in (*given, *items)}
    if len(kinds) > 1:
        _refuse("items", "query and items must all be texts, or all lists of token ids")
    query: Any = req.query if given else type(items[0])()
    joined = [item + query if req.item_first else query + item for item in items]
    return (joined, None) if kinds == {str} else (None, joined)


def _refuse(field: str, problem: str) -> NoReturn:
    raise InputError.at(field, problem)
