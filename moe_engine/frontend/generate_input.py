"""Generate requests to `Frontend`. SGLang's field names and defaults."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from moe_engine.frontend.session_params import SessionParams
from moe_engine.sampling_checks import MAX_COUNT, Count, CustomProcessor, SamplingRequest, TokenId
from moe_engine.types.constraint import FreeReasoning
from moe_engine.validation import OffOnly

Text = Annotated[str, Meta(min_length=1)]
Ids = Annotated[list[TokenId], Meta(min_length=1)]
CacheSalt = Annotated[
    str, Meta(min_length=1, description="only requests with the same salt share cached prefixes; vLLM's field")
]
Rid = Annotated[str, Meta(min_length=1, max_length=256)]
LogprobStart = Annotated[int, Meta(ge=-1, le=MAX_COUNT, description="-1: no log-probabilities of the prompt")]
Priority = Annotated[int, Meta(ge=-(2**31), le=MAX_COUNT)]
DpRank = Annotated[int, Meta(ge=0, le=2**16, description="data-parallel rank that serves the request")]

BootstrapHost = Annotated[str, Meta(max_length=255, description="host of the prefill server")]
BootstrapPort = Annotated[int, Meta(ge=0, le=65535, description="its --disaggregation-bootstrap-port")]
BootstrapRoom = Annotated[int, Meta(ge=0, le=2**63 - 1, description="number of the transfer, the same on both servers")]

Image = Annotated[str, Meta(min_length=1, description="data, http, https or file address, absolute path, or base64")]
ImageData = Annotated[
    Image | list[Image | list[Image] | None],
    Meta(description="an image, the images of a prompt, or a list with those of each prompt of a batch"),
]

_NOTHING: frozenset[int] = frozenset()


class GenerateRequest(Struct, kw_only=True):
    """One prompt or a batch. Exactly one of `text` and `input_ids` is set; a list of prompts is a batch.

    In a batch, a list has one value per prompt; any other value is for all prompts. null: the default.
    """

    text: Text | Annotated[list[Text], Meta(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId | Ids], Meta(min_length=1, description="of one prompt or a batch")] | None = None
    sampling_params: SamplingRequest | list[SamplingRequest | None] | None = None
    stream: bool | None = None
    rid: Rid | list[Rid] | None = None
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: LogprobStart | list[LogprobStart | None] | None = None
    top_logprobs_num: Count | list[Count | None] | None = None
    token_ids_logprob: list[TokenId | list[TokenId] | None] | None = None
    return_text_in_logprobs: bool | None = None
    log_metrics: Annotated[bool, Meta(description="false: without metrics and request log")] | None = None
    priority: Priority | None = None
    extra_key: str | list[str | None] | None = None
    custom_logit_processor: CustomProcessor | list[CustomProcessor | None] | None = None
    require_reasoning: Annotated[
        bool | None, Meta(description="true: the output starts inside the reasoning, and constraints apply behind it")
    ] = None
    routed_dp_rank: DpRank | None = None
    data_parallel_rank: Annotated[DpRank, Meta(description="older name of routed_dp_rank")] | None = None
    input_embeds: OffOnly = None
    image_data: ImageData | None = None
    video_data: OffOnly = None
    audio_data: OffOnly = None
    lora_path: Annotated[
        str | list[str | None] | None, Meta(description="name of a loaded LoRA adapter; null: the base model")
    ] = None
    bootstrap_host: BootstrapHost | list[BootstrapHost | None] | None = None
    bootstrap_port: BootstrapPort | list[BootstrapPort | None] | None = None
    bootstrap_room: BootstrapRoom | list[BootstrapRoom | None] | None = None
    session_params: Annotated[
        SessionParams | list[SessionParams | None] | None, Meta(description="the session that the request continues")
    ] = None
    return_hidden_states: bool | list[bool | None] | None = None
    return_prompt_token_ids: Annotated[bool | None, Meta(description="`prompt_token_ids` in each answer")] = None
    max_thinking_tokens: Annotated[
        Count | None, Meta(description="of every prompt; replaces the one in sampling_params")
    ] = None
    return_routed_experts: bool | list[bool | None] | None = None
    routed_experts_start_len: Annotated[
        Count | None, Meta(description="first token of the prompt whose experts are returned")
    ] = None
    return_indexer_topk: OffOnly = None
    return_sampling_mask: OffOnly = None
    sampling_logprobs_mode: OffOnly = None
    return_flat_raw_top_logprobs: OffOnly = None
    return_flat_raw_output_top_logprobs: OffOnly = None
    return_entropy: OffOnly = None
    watermark: OffOnly = None
    cache_salt: CacheSalt | list[CacheSalt | None] | None = None


class GenerateInput(GenerateRequest, kw_only=True):
    """A request of /generate, the OpenAI endpoints or the offline engine. The caller sets the fields below."""

    sampling_params: Any = None
    """One of `SamplingRequest`, `SamplingParams` and a dict with the fields of the former, or a list of those."""
    add_special_tokens: bool = True
    keep_special: frozenset[int] = _NOTHING
    """Special tokens kept in the text even with skip_special_tokens (tool-call markers)."""
    reasoning: FreeReasoning | None = None
    """Before constrained outputs."""
    text_field: str = "text"
    ids_field: str = "input_ids"
    sampling_field: str = "sampling_params"
    max_tokens_field: str = "sampling_params.max_new_tokens"
    top_logprobs_field: str = "top_logprobs_num"
    """The client's names of these fields, for messages."""
    max_tokens_asked: bool = True
    """With `SamplingParams`: whether `max_new_tokens` is the client's exact number; a default, or the upper bound of
    an API whose clients do not know the space, is reduced to fit."""
    cumulative: bool = True
    """Stream chunks hold the whole output so far, unless the server's settings override it."""
    model: str | None = None
    """OpenAI's `model`, which may select a LoRA adapter."""
    image_data: Any = None
    """As in the request; or a list of `ImageSource`, of one prompt."""
    pooled: bool = False
    """Requests the vector of each prompt instead of text; `dimensions`: its first numbers, None for all."""
    dimensions: int | None = None

    @property
    def dp_rank(self) -> int | None:
        return self.data_parallel_rank if self.routed_dp_rank is None else self.routed_dp_rank
