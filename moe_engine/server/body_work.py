"""Body work functions of all endpoints that take text, by name; used by the server and the large-body processes."""

from __future__ import annotations

from moe_engine.server.anthropic_api import AnthropicApi
from moe_engine.server.bodies import Work
from moe_engine.server.embeddings_api import EmbeddingsApi
from moe_engine.server.native_api import NativeApi
from moe_engine.server.ollama_api import OllamaApi
from moe_engine.server.openai.chat import ChatApi
from moe_engine.server.openai.completions import CompletionsApi
from moe_engine.server.parse_api import ParseApi
from moe_engine.server.responses.api import ResponsesApi
from moe_engine.server.scoring_api import ScoringApi
from moe_engine.server.state import ServerState


def body_work(state: ServerState) -> dict[str, Work]:
    native, parse, anthropic = NativeApi(state), ParseApi(state), AnthropicApi(state)
    vectors, scoring, ollama = EmbeddingsApi(state), ScoringApi(state), OllamaApi(state)
    created = ResponsesApi(state, state.responses)
    return {
        "generate": native.read_generate,
        "completions": CompletionsApi(state).read,
        "chat_completions": ChatApi(state).read,
        "embeddings": vectors.read_embeddings,
        "encode": vectors.read_encode,
        "score": scoring.read_score,
        "rerank": scoring.read_rerank,
        "relevance": scoring.read_relevance,
        "classify": scoring.read_classify,
        "responses": created.read,
        "responses_input_tokens": created.counted,
        "messages": anthropic.read,
        "count_tokens": anthropic.counted,
        "ollama_chat": ollama.read_chat,
        "ollama_generate": ollama.read_generate,
        "tokenize": native.tokenized,
        "detokenize": native.detokenized,
        "separate_reasoning": parse.separated,
        "parse_function_call": parse.parsed,
    }
