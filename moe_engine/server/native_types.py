"""Bodies, queries and answers of the endpoints outside OpenAI's interface; `GenerateRequest` is the frontend's."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta, Struct

from moe_engine.sampling_checks import TokenId
from moe_engine.server.openai.types import Messages, Tool
from moe_engine.tuning.doctor.diagnosis import Finding
from moe_engine.validation import PathText

MAX_FLUSH_SECONDS = 3600
# -- bodies and queries


class AbortRequest(Struct):
    """Aborts the requests whose id starts with `rid`, or all."""

    rid: str | None = None
    abort_all: bool | None = False


class FlushQuery(Struct):
    timeout: Annotated[float, Meta(ge=0, le=MAX_FLUSH_SECONDS, description="seconds to wait until idle")] = 0


class UpdateWeightsRequest(Struct):
    """`model_path`: a folder that every node can read."""

    model_path: Annotated[PathText, Meta(min_length=1)]
    load_format: Literal["auto", "safetensors", "dummy"] | None = None
    weight_version: str | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None
    is_async: bool | None = None
    torch_empty_cache: bool | None = None
    keep_pause: bool | None = None
    recapture_cuda_graph: bool | None = None
    token_step: int | None = None


class UpdateTensorsRequest(Struct):
    """`serialized_named_tensors`: safetensors data in base64, with whole tensors under the names of the checkpoint: one
    item for all ranks, or one for each."""

    serialized_named_tensors: Annotated[list[str], Meta(min_length=1)]
    load_format: Literal["auto"] | None = None
    flush_cache: Annotated[bool | None, Meta(description="the prefix cache is flushed in any case")] = None
    weight_version: str | None = None
    abort_all_requests: bool | None = None
    torch_empty_cache: bool | None = None


class InitGroupRequest(Struct):
    """A torch.distributed group whose rank 0 is a trainer; the engine's ranks begin at `rank_offset`."""

    master_address: Annotated[str, Meta(min_length=1)]
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, Meta(ge=1)]
    world_size: Annotated[int, Meta(ge=2)]
    group_name: Annotated[str, Meta(min_length=1, max_length=256)] = "weight_update_group"
    backend: Literal["nccl", "gloo"] = "nccl"
    timeout: Annotated[float, Meta(gt=0, le=86400, description="seconds for all members to join")] = 300


class DestroyGroupRequest(Struct):
    group_name: Annotated[str, Meta(min_length=1, max_length=256)] = "weight_update_group"


class ReceiveWeightsRequest(Struct):
    """Whole tensors under the names of the checkpoint, in the order in which rank 0 of the group broadcasts them.
    `dtypes`: torch's names."""

    names: Annotated[list[str], Meta(min_length=1)]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Meta(ge=0, le=2**62)]]]
    group_name: Annotated[str, Meta(min_length=1, max_length=256)] = "weight_update_group"
    load_format: Literal["auto"] | None = None
    flush_cache: Annotated[bool | None, Meta(description="the prefix cache is flushed in any case")] = None
    weight_version: str | None = None
    abort_all_requests: bool | None = None
    torch_empty_cache: bool | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400, description="seconds for all tensors to arrive")] = 300


class WeightVersionRequest(Struct):
    """`abort_all_requests`: running requests are aborted; otherwise their answers keep the version with which they
    began."""

    new_version: str
    abort_all_requests: bool = True


class PostProcessRequest(Struct):
    """Both have no effect: every update leaves the weights in the form of the kernels."""

    restore_weights_before_load: bool = False
    post_process_quantization: bool = False


class WeightQuery(Struct):
    """`name`: as in the checkpoint. `truncate_size`: number of rows."""

    name: Annotated[str, Meta(min_length=1)]
    truncate_size: Annotated[int, Meta(ge=1, le=2**31)] = 100


class WeightRequest(WeightQuery):
    """`WeightQuery` as a body."""


class PauseRequest(Struct):
    mode: Annotated[Literal["abort", "retract", "in_place"], Meta(description="of running requests")] = "abort"


class ContinueRequest(Struct):
    torch_empty_cache: bool | None = None


class Continued(TypedDict):
    status: str
    message: str


class Paused(Continued):
    num_paused_requests: int


class LoadLoraRequest(Struct):
    """`lora_path`: an adapter's folder that every node can read."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_path: Annotated[PathText, Meta(min_length=1)]
    pinned: Annotated[bool | None, Meta(description="true: the adapter keeps its slot")] = None


class UnloadLoraRequest(Struct):
    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]


class SetStateRequest(Struct):
    """`server_args`: value by flag, of each scheduler; /get_internal_state has the flags with their bounds."""

    server_args: dict[str, Any]


class MemoryRequest(Struct):
    """`tags`: "kv_cache", "weights"; null: both."""

    tags: list[str] | None = None


class ProfileRequest(Struct):
    """`output_dir`: default $SGLANG_TORCH_PROFILER_DIR, or the system's temporary folder."""

    output_dir: PathText | None = None
    num_steps: Annotated[int, Meta(ge=1)] | None = None
    activities: list[Literal["CPU", "GPU"]] | None = None
    record_shapes: bool | None = None
    with_stack: bool | None = None
    profile_id: PathText | None = None
    profile_prefix: PathText | None = None
    start_step: int | None = None
    profile_by_stage: bool | None = None
    merge_profiles: bool | None = None


class TokenizeRequest(Struct):
    """Exactly one of `prompt` and `messages` is set."""

    prompt: str | Annotated[list[str], Meta(min_length=1)] | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool] | None, Meta(description="with messages, for the chat template")] = None
    add_special_tokens: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = False
    add_generation_prompt: bool | None = None
    return_token_strs: Annotated[bool | None, Meta(description="`token_strs` in the answer, as in vLLM")] = False


class DetokenizeRequest(Struct):
    tokens: list[TokenId | list[TokenId]]
    skip_special_tokens: bool | None = True


class SeparateReasoningRequest(Struct):
    text: str
    reasoning_parser: Annotated[str | None, Meta(description="null: the server's --reasoning-parser")] = None


class ParseFunctionCallRequest(Struct):
    text: str
    tools: list[Tool]
    tool_call_parser: Annotated[str | None, Meta(description="null: the server's --tool-call-parser")] = None


class LoadsQuery(Struct):
    dp_rank: Annotated[int, Meta(ge=0)] | None = None
    include: Annotated[str, Meta(pattern="^(core|all)(,(core|all))*$")] = "core"
    format: Annotated[str, Meta(pattern="^json$")] = "json"


class DoctorQuery(Struct):
    minutes: Annotated[float, Meta(gt=0, le=10)] = 5.0


# -- answers


class GroupChanged(TypedDict):
    success: bool
    message: str


class WeightsUpdated(GroupChanged):
    num_paused_requests: int


class WeightVersion(TypedDict):
    weight_version: str


class WeightVersionUpdated(GroupChanged):
    new_version: str


class StateSet(TypedDict):
    """`server_args`: the values in force, of the first scheduler."""

    updated: bool
    server_args: dict[str, Any]


class StateShown(TypedDict):
    """Settings by scheduler. `bounds`: least and largest value of each setting."""

    values: dict[str, Any]
    bounds: dict[str, list[float | str | None]]


class MemoryChanged(GroupChanged):
    """`released`: the parts whose memory is released now."""

    released: list[str]


class LoraChanged(GroupChanged):
    """`loaded_adapters`: path by name."""

    loaded_adapters: dict[str, str]
    error_message: NotRequired[str]


class FinishReason(TypedDict, total=False):
    type: Literal["stop", "length", "abort"]
    matched: int | str | None
    length: int
    message: str | None
    status_code: int | None
    err_type: None


Logprob = tuple[float | None, int, str | None]
"""[log-probability, token id, text]"""
Alternatives = list[Logprob] | None


class CachedTokensDetails(TypedDict):
    """Cached tokens by the tier that held them."""

    device: int
    host: int
    storage: NotRequired[int]
    storage_backend: NotRequired[str]


class MetaInfo(TypedDict):
    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    weight_version: str
    total_retractions: int
    num_retractions: int
    completion_tokens: int
    reasoning_tokens: int
    """Up to the tag that ends the reasoning: of chats, and of requests with `require_reasoning`; else 0."""
    cached_tokens: int
    cached_tokens_details: NotRequired[CachedTokensDetails]
    """At the end, with --enable-hierarchical-cache."""
    queue_time: float
    e2e_latency: NotRequired[float]
    first_token_latency: NotRequired[float]
    request_received_ts: NotRequired[float]
    request_finished_ts: NotRequired[float]
    forward_entry_time: NotRequired[float]
    prefill_finished_time: NotRequired[float]
    decode_throughput: NotRequired[float]
    dp_rank: NotRequired[int]
    hidden_states: NotRequired[list[Any]]
    """At the end: of the prompt, [tokens][width]; then [width] for each output token but the last."""
    routed_experts: NotRequired[str]
    """At the end: base64 of int32 [tokens][layers][experts per token]."""
    spec_verify_ct: NotRequired[int]
    spec_accept_length: NotRequired[float]
    spec_accept_rate: NotRequired[float]
    spec_num_correct_drafts: NotRequired[int]
    spec_num_proposed_drafts: NotRequired[int]
    spec_correct_drafts_histogram: NotRequired[list[int]]
    input_token_logprobs: NotRequired[list[Logprob]]
    input_top_logprobs: NotRequired[list[Alternatives]]
    input_token_ids_logprobs: NotRequired[list[Alternatives]]
    output_token_logprobs: NotRequired[list[Logprob]]
    output_top_logprobs: NotRequired[list[Alternatives]]
    output_token_ids_logprobs: NotRequired[list[Alternatives]]
    output_token_logprobs_length: NotRequired[int]


class Output(TypedDict):
    text: NotRequired[str]
    output_ids: list[int]
    prompt_token_ids: NotRequired[list[int]]
    """With `return_prompt_token_ids`."""
    meta_info: MetaInfo
    index: NotRequired[int]
    """In a stream of several outputs."""


class Encoded(TypedDict):
    """`embedding`: for a classification or reward model, the scores."""

    embedding: list[float]
    meta_info: MetaInfo


class Tokens(TypedDict):
    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: NotRequired[list[str | list[str]]]


class Texts(TypedDict):
    """`prompt`: vLLM's name of the text of one list."""

    text: str | list[str]
    prompt: NotRequired[str]


class TokenizerInfo(TypedDict):
    """vLLM's; `chat_template`: the one in force, if it is Jinja."""

    tokenizer_class: str
    model_max_length: int
    bos_token: NotRequired[str]
    eos_token: NotRequired[str]
    pad_token: NotRequired[str]
    unk_token: NotRequired[str]
    chat_template: NotRequired[str]


class SeparatedReasoning(TypedDict):
    reasoning_text: str
    text: str


class ParsedCall(TypedDict):
    tool_index: int
    name: str
    parameters: str


class ParsedCalls(TypedDict):
    normal_text: str
    calls: list[ParsedCall]


class ModelInfo(TypedDict):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: dict[str, Any] | None
    weight_version: str
    served_model_name: str
    model_type: str
    architectures: list[str]
    reasoning_parser: str | None
    tool_call_parser: str | None
    has_image_understanding: bool
    has_audio_understanding: bool
    max_context_length: int
    vocab_size: int


class ServerInfo(TypedDict):
    """Further fields: every flag with the value in force."""

    max_running_requests: int
    status: str
    max_total_num_tokens: int
    max_req_input_len: int
    last_gen_throughput: float
    alive_dp_ranks: list[int]
    lost_dp_ranks: dict[str, str]
    released_memory: list[str]
    internal_states: list[dict[str, Any]]
    startup_time: float
    version: str


class RankLoad(TypedDict):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    max_running_requests: int


class TotalLoad(TypedDict):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    total_used_tokens: int
    avg_token_usage: float


class Loads(TypedDict):
    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[RankLoad]
    aggregate: TotalLoad


class OldLoad(TypedDict):
    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class DoctorReport(TypedDict):
    source: str
    engine: str
    num_lines: int
    num_batches: int
    num_broken: int
    num_windows: int
    num_rules: int
    healthy: bool
    findings: list[Finding]
    without_facts: list[str]
    text: str


class Root(TypedDict):
    server: str
    docs: str
    endpoints: list[str]


class OpenAPI(TypedDict):
    openapi: str
    info: dict[str, str]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: list[dict[str, list[str]]]
