"""Fields of SGLang's and vLLM's answers beyond OpenAI's, selected by the request: token ids, `meta_info`, `sglext`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from moe_engine.config.server import ServerArgs
from moe_engine.frontend.generation import Generation
from moe_engine.server.openai.types import ChatRequest, CommonRequest

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
SPECULATION = (
    "spec_accept_rate", "spec_accept_length", "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_verify_ct",
    "spec_correct_drafts_histogram",
)  # fmt: skip


def wants_usage(req: CommonRequest, flags: ServerArgs) -> bool:
    """Whether a stream ends with the usage."""
    asked = None if req.stream_options is None else req.stream_options.include_usage
    return flags.stream_response_default_include_usage if asked is None else asked


class ChoiceExtras:
    """Fields of a choice.

    `prompt_token_ids` and `token_ids` are vLLM's names and those of SGLang's completions; SGLang's chat answers have
    `response_token_ids`.
    """

    def __init__(self, req: CommonRequest) -> None:
        chat = req if isinstance(req, ChatRequest) else None
        self._ids = ("token_ids",) if chat is None else ("token_ids", "response_token_ids")
        self.has_ids = bool(req.return_token_ids)
        self._has_prompt = self.has_ids or bool(chat is not None and chat.return_prompt_token_ids)
        self._has_meta = bool(chat is not None and chat.return_meta_info)

    def whole(self, g: Generation) -> dict[str, Any]:
        """Fields of a complete output."""
        return self.begin(g) | self.ids(g.output_ids) | self.end(g)

    def begin(self, g: Generation) -> dict[str, Any]:
        """Fields of the first event of a stream."""
        return {"prompt_token_ids": list(g.prompt_ids)} if self._has_prompt else {}

    def chat_prompt(self, g: Generation) -> dict[str, Any]:
        """Fields of a chat's answer, or of the first event of each choice of its stream: vLLM has the prompt there."""
        return {"prompt_token_ids": list(g.prompt_ids)} if self.has_ids else {}

    def ids(self, ids: Sequence[int]) -> dict[str, Any]:
        """Fields of an event with these new tokens."""
        return {name: list(ids) for name in self._ids} if self.has_ids else {}

    def end(self, g: Generation) -> dict[str, Any]:
        """Fields of the event that ends the choice."""
        return {"meta_info": g.meta_info()} if self._has_meta else {}


def answer_extras(req: CommonRequest, flags: ServerArgs, generations: Sequence[Generation]) -> dict[str, Any]:
    """`sglext` of a whole answer, or of the last event of a stream; empty if nothing was asked for."""
    first = generations[0]
    found: dict[str, Any] = {}
    if req.return_cached_tokens_details:
        found["cached_tokens_details"] = first.cached_by_tier()
    if req.return_spec_tokens_details and first.speculation is not None:
        details = [_speculation(g) for g in generations]
        found["spec_tokens_details"] = details[0] if len(details) == 1 else details
    if req.return_routed_experts and first.experts is not None:
        found["routed_experts"] = first.experts.shown(len(first.output_ids))
    if isinstance(req, ChatRequest):
        if req.return_input_ids_in_sglext or flags.return_input_ids:
            found["input_ids"] = list(first.prompt_ids)
        if req.return_output_ids_in_sglext or flags.return_output_ids:
            found["output_ids"] = [list(g.output_ids) for g in generations]
    return {"sglext": found} if found else {}


def _speculation(g: Generation) -> dict[str, Any]:
    meta = g.meta_info()
    return {name: meta[name] for name in SPECULATION if name in meta}
