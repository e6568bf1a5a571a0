"""All endpoints with their types: the one list for the application's routes and for the description of the API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_engine.frontend.encoding import EncodeRequest
from moe_engine.frontend.generate_input import GenerateRequest
from moe_engine.frontend.scoring import ScoreRequest
from moe_engine.server import anthropic_types as anthropic
from moe_engine.server import native_types as native
from moe_engine.server import ollama_types as ollama
from moe_engine.server.anthropic_api import AnthropicApi
from moe_engine.server.control_api import ControlApi
from moe_engine.server.doctor_api import DoctorApi, History
from moe_engine.server.embeddings_api import EmbeddingsApi
from moe_engine.server.engine_api import EngineApi
from moe_engine.server.expert_types import ExpertGain, ExpertView
from moe_engine.server.experts_api import ExpertsApi
from moe_engine.server.metrics import Metrics
from moe_engine.server.native_api import NativeApi
from moe_engine.server.ollama_api import OllamaApi
from moe_engine.server.openai import answers
from moe_engine.server.openai.chat import ChatApi
from moe_engine.server.openai.completions import CompletionsApi
from moe_engine.server.openai.types import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    RelevanceRequest,
    RerankRequest,
)
from moe_engine.server.openapi import HTML, JSON_LINES, TEXT, Endpoint
from moe_engine.server.operations_api import ConfigureLoggingRequest, OperationsApi
from moe_engine.server.pages_api import PagesApi
from moe_engine.server.parse_api import ParseApi
from moe_engine.server.responses import types as responses
from moe_engine.server.responses.api import ResponsesApi
from moe_engine.server.scoring_api import ScoringApi
from moe_engine.server.sessions_api import CloseSessionRequest, OpenSessionRequest, SessionsApi
from moe_engine.server.state import ServerState
from moe_engine.server.trainer_api import TrainerApi

AT_ONCE = "send the requests one by one, without waiting for answers: the scheduler batches them"
ONE_BY_ONE = f"{AT_ONCE}; SGLang has removed this endpoint too"
STORAGE_AT_START = "storage is attached at start (--hicache-storage-backend)"
REFUSED_PATHS = {
    "/update_weights": "the old name of /update_weights_from_disk",
    "/update_weights_from_ipc": "CUDA IPC handles are not accepted; use /update_weights_from_distributed",
    "/begin_weight_update": "an update is one call here; pause generation around several",
    "/end_weight_update": "an update is one call here; pause generation around several",
    "/weights_checker": "compare tensors with /get_weights_by_name",
    "/slow_down": "artificial delays of steps are not supported; `moe-engine simulate` shows a slower launch",
    "/generate_from_file": ONE_BY_ONE,
    "/v1/files": ONE_BY_ONE,
    "/v1/batches": ONE_BY_ONE,
    "/v1/messages/batches": AT_ONCE,
    "/vertex_generate": "use /generate, or /invocations",
    **dict.fromkeys(("/api/embed", "/api/embeddings"), "use /v1/embeddings"),
    "/api/pull": "a server has the model of its start (--model-path)",
    "/v1/audio/transcriptions": "audio is not accepted",
    "/v1/realtime": "audio is not accepted",
    "/v1/responses/compact": "send the end of the conversation, or truncation: auto",
    "/load_lora_adapter_from_tensors": "write the adapter into a folder and use /load_lora_adapter",
    "/hicache/storage-backend": STORAGE_AT_START,
    "/pd_role_switch": "the role of a server is fixed at its start (--disaggregation-mode)",
    "/set_trace_level": "traces have one level; --enable-trace switches them on",
    **dict.fromkeys(("/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"),
                    "n-gram drafts come from the requests' own text"),
    **dict.fromkeys(("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance",
                     "/remote_instance_transfer_engine_info", "/get_remote_instance_transfer_engine_info"),
                    "servers load their weights from files; use /update_weights_from_distributed"),
}  # fmt: skip
"""Endpoints of SGLang, OpenAI or Ollama that are not offered, with the reason and what to use."""


def endpoints(state: ServerState, metrics: Metrics | None, history: History) -> Iterator[Endpoint]:
    chat, completions, api = ChatApi(state), CompletionsApi(state), NativeApi(state)
    control, parse, experts, pages = ControlApi(state), ParseApi(state), ExpertsApi(state), PagesApi(state, metrics)
    messages, created, local = AnthropicApi(state), ResponsesApi(state, state.responses), OllamaApi(state)
    sessions, operations = SessionsApi(state.frontend.sessions), OperationsApi(state)
    doctor = DoctorApi(state, history)
    for path, reason in REFUSED_PATHS.items():  # before paths with a parameter, which would take them
        yield Endpoint(path, control.refuse(reason), "GET POST PUT", available=False)
    # fmt: off
    yield Endpoint("/v1/chat/completions", chat.chat_completions, "POST", answers.ChatCompletion,
                   body=ChatRequest, event=answers.ChatChunk, aliases=("/invocations",))
    yield Endpoint("/v1/completions", completions.completions, "POST", answers.Completion,
                   body=CompletionRequest, event=answers.CompletionChunk)
    yield from _of_vectors(state)
    yield Endpoint("/v1/responses", created.create, "POST", responses.ResponseObject,
                   body=responses.ResponsesRequest, event=responses.ResponseEvent, names_events=True)
    yield Endpoint("/v1/responses/input_tokens", created.input_tokens, "POST", responses.InputTokens,
                   body=responses.ResponsesRequest)
    yield Endpoint("/v1/responses/{response_id}", created.retrieve, answer=responses.ResponseObject,
                   query=responses.RetrieveQuery)
    yield Endpoint("/v1/responses/{response_id}", created.delete, "DELETE", responses.DeletedResponse)
    yield Endpoint("/v1/responses/{response_id}/cancel", created.cancel, "POST", responses.ResponseObject)
    yield Endpoint("/v1/responses/{response_id}/input_items", created.input_items, answer=responses.ItemList,
                   query=responses.InputItemsQuery)
    yield Endpoint("/v1/messages", messages.messages, "POST", anthropic.AnthropicMessage,
                   body=anthropic.MessagesRequest, event=anthropic.StreamEvent, names_events=True)
    yield Endpoint("/v1/messages/count_tokens", messages.count_tokens, "POST", anthropic.TokenCount,
                   body=anthropic.CountRequest)
    yield Endpoint("/api/chat", local.chat, "POST", ollama.OllamaAnswer, body=ollama.OllamaChatRequest,
                   event=ollama.OllamaAnswer, stream=JSON_LINES)
    yield Endpoint("/api/generate", local.generate, "POST", ollama.OllamaAnswer, body=ollama.OllamaGenerateRequest,
                   event=ollama.OllamaAnswer, stream=JSON_LINES)
    yield Endpoint("/api/tags", local.tags, answer=ollama.ModelTags)
    yield Endpoint("/api/ps", local.loaded, answer=ollama.LoadedModels)
    yield Endpoint("/api/show", local.show, "POST", ollama.ShownModel, body=ollama.ShowRequest)
    yield Endpoint("/api/version", local.version, answer=ollama.Version, aliases=("/version",))
    yield Endpoint("/v1/models", pages.models, answer=answers.ModelList)
    yield Endpoint("/v1/models/{model:path}", pages.model, answer=answers.ModelCard)
    yield Endpoint("/generate", api.generate, "POST PUT", native.Output | list[native.Output],
                   body=GenerateRequest, event=native.Output)
    yield Endpoint("/abort_request", api.abort_request, "POST", body=native.AbortRequest)
    yield Endpoint("/flush_cache", api.flush_cache, "GET POST", str, TEXT, query=native.FlushQuery,
                   aliases=("/reset_prefix_cache",))
    yield Endpoint("/tokenize", api.tokenize, "POST", native.Tokens,
                   body=native.TokenizeRequest, aliases=("/v1/tokenize",))
    yield Endpoint("/detokenize", api.detokenize, "POST", native.Texts,
                   body=native.DetokenizeRequest, aliases=("/v1/detokenize",))
    yield Endpoint("/tokenizer_info", api.tokenizer_info, answer=native.TokenizerInfo)
    yield Endpoint("/separate_reasoning", parse.separate_reasoning, "POST", native.SeparatedReasoning,
                   body=native.SeparateReasoningRequest)
    yield Endpoint("/parse_function_call", parse.parse_function_call, "POST", native.ParsedCalls,
                   body=native.ParseFunctionCallRequest)
    yield Endpoint("/health", control.health, aliases=("/ready", "/ping"))
    yield Endpoint("/health_generate", control.health_generate)
    yield Endpoint("/model_info", control.model_info, answer=native.ModelInfo, aliases=("/get_model_info",))
    yield Endpoint("/server_info", control.server_info, answer=native.ServerInfo, aliases=("/get_server_info",))
    yield Endpoint("/v1/loads", control.loads, answer=native.Loads, query=native.LoadsQuery)
    yield Endpoint("/get_load", control.get_load, answer=list[native.OldLoad])
    yield Endpoint("/start_expert_distribution_record", experts.start, "GET POST", str, TEXT)
    yield Endpoint("/stop_expert_distribution_record", experts.stop, "GET POST", str, TEXT)
    yield Endpoint("/dump_expert_distribution_record", experts.dump, "GET POST", str, TEXT)
    yield Endpoint("/open_session", sessions.open, "GET POST", str, body=OpenSessionRequest)
    yield Endpoint("/close_session", sessions.close, "GET POST", body=CloseSessionRequest)
    yield Endpoint("/configure_logging", operations.configure_logging, "GET POST", body=ConfigureLoggingRequest)
    yield Endpoint("/freeze_gc", operations.freeze_gc, "GET POST", str, TEXT)
    yield Endpoint("/clear_hicache_storage_backend", operations.clear_storage, "GET POST", str, TEXT,
                   aliases=("/hicache/storage-backend/clear",))
    yield from _of_engine(EngineApi(state), state)
    yield Endpoint("/experts", experts.page, answer=str, media=HTML)
    yield Endpoint("/experts/data", experts.data, answer=ExpertView)
    yield Endpoint("/experts/gain", experts.gain, answer=ExpertGain)
    yield Endpoint("/doctor", doctor.doctor, answer=native.DoctorReport, query=native.DoctorQuery)
    yield Endpoint("/metrics", pages.measured, answer=str, media=TEXT)
    yield Endpoint("/", pages.root, answer=native.Root)
    yield Endpoint("/openapi.json", pages.description, answer=native.OpenAPI)
    yield Endpoint("/docs", pages.docs, answer=str, media=HTML)
    # fmt: on


def _of_vectors(state: ServerState) -> Iterator[Endpoint]:
    """Embeddings and scores."""
    vectors, scoring = EmbeddingsApi(state), ScoringApi(state)
    # fmt: off
    yield Endpoint("/v1/embeddings", vectors.embeddings, "POST", answers.EmbeddingList, body=EmbeddingRequest)
    yield Endpoint("/v1/score", scoring.score, "POST", answers.Scores, body=ScoreRequest)
    yield Endpoint("/v1/rerank", scoring.rerank, "POST PUT", list[answers.Ranked], body=RerankRequest)
    yield Endpoint("/v2/rerank", scoring.relevance, "POST", answers.Relevances, body=RelevanceRequest,
                   aliases=("/rerank",))
    yield Endpoint("/v1/classify", scoring.classify, "POST", answers.ClassList, body=ClassifyRequest)
    yield Endpoint("/encode", vectors.encode, "POST PUT", native.Encoded | list[native.Encoded], body=EncodeRequest)
    yield Endpoint("/classify", vectors.classify, "POST PUT", native.Encoded | list[native.Encoded], body=EncodeRequest)
    # fmt: on


def _of_engine(engine: EngineApi, state: ServerState) -> Iterator[Endpoint]:
    """Endpoints that call every scheduler or rank."""
    trainer = TrainerApi(state, engine.updates)
    # fmt: off
    yield Endpoint("/update_weights_from_disk", engine.update_weights, "POST", native.WeightsUpdated,
                   body=native.UpdateWeightsRequest, refuses_so=True)
    yield Endpoint("/update_weights_from_tensor", engine.update_tensors, "POST", native.WeightsUpdated,
                   body=native.UpdateTensorsRequest, refuses_so=True)
    yield Endpoint("/init_weights_update_group", trainer.init_group, "POST", native.GroupChanged,
                   body=native.InitGroupRequest, refuses_so=True)
    yield Endpoint("/destroy_weights_update_group", trainer.destroy_group, "POST", native.GroupChanged,
                   body=native.DestroyGroupRequest, refuses_so=True)
    yield Endpoint("/update_weights_from_distributed", trainer.update_weights, "POST", native.WeightsUpdated,
                   body=native.ReceiveWeightsRequest, refuses_so=True)
    yield Endpoint("/update_weight_version", engine.update_version, "POST", native.WeightVersionUpdated,
                   body=native.WeightVersionRequest)
    yield Endpoint("/get_weight_version", engine.version, answer=native.WeightVersion, aliases=("/weight_version",))
    yield Endpoint("/post_process_weights", engine.post_process, "POST", native.GroupChanged,
                   body=native.PostProcessRequest)
    yield Endpoint("/get_weights_by_name", engine.weights_by_name, "GET POST", list[Any],
                   query=native.WeightQuery, body=native.WeightRequest)
    yield Endpoint("/load_lora_adapter", engine.load_lora, "POST", native.LoraChanged,
                   body=native.LoadLoraRequest, refuses_so=True)
    yield Endpoint("/unload_lora_adapter", engine.unload_lora, "POST", native.LoraChanged,
                   body=native.UnloadLoraRequest, refuses_so=True)
    yield Endpoint("/pause_generation", engine.pause, "POST", native.Paused, body=native.PauseRequest)
    yield Endpoint("/continue_generation", engine.resume, "POST", native.Continued, body=native.ContinueRequest)
    yield Endpoint("/release_memory_occupation", engine.release_memory, "GET POST", native.MemoryChanged,
                   body=native.MemoryRequest, refuses_so=True)
    yield Endpoint("/resume_memory_occupation", engine.resume_memory, "GET POST", native.MemoryChanged,
                   body=native.MemoryRequest, refuses_so=True)
    yield Endpoint("/set_internal_state", engine.set_state, "POST", native.StateSet, body=native.SetStateRequest)
    yield Endpoint("/get_internal_state", engine.get_state, "GET", list[native.StateShown])
    yield Endpoint("/start_profile", engine.start_profile, "GET POST", str, TEXT, body=native.ProfileRequest)
    yield Endpoint("/stop_profile", engine.stop_profile, "GET POST", str, TEXT)
    # fmt: on
