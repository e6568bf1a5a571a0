"""Answers of the OpenAI endpoints. Log-probabilities are rendered as JSON by `logprob_json`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class CachedTokens(TypedDict):
    cached_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens | None
    """With --enable-cache-report."""
    reasoning_tokens: int
    """SGLang's place of the count."""
    completion_tokens_details: NotRequired[ReasoningTokens]
    """OpenAI's place of the count, after a reasoning."""


class Metadata(TypedDict):
    weight_version: str


class TopLogprob(TypedDict):
    token: str
    bytes: list[int]
    logprob: float | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]


class CalledFunction(TypedDict):
    """In a stream the call's first piece has the name, and the arguments follow in parts."""

    arguments: str
    name: NotRequired[str]


class ToolCallPiece(TypedDict):
    index: int
    function: CalledFunction
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCallPiece] | None


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: str | None
    reasoning_content: str | None
    tool_calls: NotRequired[list[ToolCallPiece]]


class Choice(TypedDict):
    """`hidden_states`: with `return_hidden_states`, of the last token that was computed."""

    index: int
    prompt_token_ids: NotRequired[list[int]]
    """With `return_token_ids`; in a stream, of the choice's first event."""
    token_ids: NotRequired[list[int]]
    """With `return_token_ids`; in a stream, of the event's tokens."""
    hidden_states: NotRequired[list[float]]
    finish_reason: str | None
    matched_stop: int | str | None
    """The stop string or token id that ended the output."""


class ChatChoiceFields(Choice):
    response_token_ids: NotRequired[list[int]]
    """`token_ids`, by SGLang's name."""
    meta_info: NotRequired[dict[str, Any]]
    """With `return_meta_info`, at the end."""


class ChatChoice(ChatChoiceFields):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(ChatChoiceFields):
    delta: Delta
    logprobs: ChatLogprobs | None


class SGLangFields(TypedDict, total=False):
    """SGLang's fields of a whole answer, each if the request asked for it."""

    cached_tokens_details: dict[str, Any]
    spec_tokens_details: dict[str, Any] | list[dict[str, Any]]
    input_ids: list[int]
    output_ids: list[list[int]]
    routed_experts: str


class Head(TypedDict):
    sglext: NotRequired[SGLangFields]
    """In a stream, of the last event with data."""
    id: str
    created: int
    model: str


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]
    """With `return_token_ids`, as in vLLM."""
    usage: Usage
    metadata: Metadata


class ChatChunk(Head):
    """`usage`: with stream_options."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[int]]
    """With `return_token_ids`, in the first event of each choice."""
    usage: NotRequired[Usage]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class CompletionChunk(Head):
    """`usage`: with stream_options."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]


class Completion(CompletionChunk):
    metadata: Metadata


class Embedding(TypedDict):
    """`embedding`: a text with encoding_format base64 (float32, little-endian)."""

    object: Literal["embedding"]
    embedding: list[float] | str
    index: int


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Scores(TypedDict):
    """`scores`: of each item, one for each label or class."""

    object: Literal["scoring"]
    scores: list[list[float]]
    token_logprobs: NotRequired[list[list[float]]]
    """With `return_token_logprobs`."""
    model: str
    usage: Usage


class Ranked(TypedDict):
    """`document`: null with return_documents false."""

    score: float
    document: str | None
    index: int
    meta_info: dict[str, Any]


class DocumentText(TypedDict):
    text: str


class Relevance(TypedDict):
    """`document`: unless return_documents is false."""

    index: int
    relevance_score: float
    """Between 0 and 1."""
    document: NotRequired[DocumentText]


class Relevances(TypedDict):
    id: str
    model: str
    results: list[Relevance]
    usage: Usage


class Classification(TypedDict):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: Usage


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | int | None


class Error(TypedDict):
    error: ErrorFields


class OpenAIError(ErrorFields):
    object: Literal["error"]
    error: ErrorFields
