"""LlamaIndex's OpenAI-like classes against the embedded model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import KEY

WHY = "needs LlamaIndex: pip install llama-index-llms-openai-like llama-index-embeddings-openai-like"
llms = pytest.importorskip("llama_index.llms.openai_like", reason=WHY)
embeddings = pytest.importorskip("llama_index.embeddings.openai_like", reason=WHY)

FRANCE = "What is the capital of France?"


@pytest.fixture
def model(url: str) -> Any:
    return llms.OpenAILike(
        model="default", api_base=url, api_key=KEY, temperature=0, max_tokens=60, is_chat_model=True,
        is_function_calling_model=True, context_window=2048, max_retries=0,
    )  # fmt: skip


def test_chat_and_streams(model: Any) -> None:
    from llama_index.core.llms import ChatMessage

    messages = [ChatMessage(role="user", content=FRANCE)]
    answer = model.chat(messages).message.content
    assert "Paris" in answer
    assert [*model.stream_chat(messages)][-1].message.content == answer
    assert model.complete(FRANCE).text == answer
    assert [*model.stream_complete(FRANCE)][-1].text == answer


def test_completions(url: str) -> None:
    model = llms.OpenAILike(model="default", api_base=url, api_key=KEY, temperature=0, max_tokens=8, max_retries=0)
    text = model.complete("The capital of France is").text
    assert "Paris" in text
    assert [*model.stream_complete("The capital of France is")][-1].text == text


def test_a_tool_is_called(model: Any) -> None:
    from llama_index.core.tools import FunctionTool

    calls: list[str] = []

    def get_weather(city: str) -> str:
        """Weather of a city"""
        calls.append(city)
        return "sunny"

    tool = FunctionTool.from_defaults(fn=get_weather)
    answer = model.predict_and_call([tool], "What is the weather in Paris?")
    assert calls == ["Paris"] and str(answer.response) == "sunny"


def test_embeddings(vectors_url: str) -> None:
    model = embeddings.OpenAILikeEmbedding(model_name="default", api_base=vectors_url, api_key=KEY, max_retries=0)
    texts = ["The capital of France is Paris.", "Seven plus four is eleven."]
    one, two = model.get_text_embedding_batch(texts)
    assert len(one) == len(two) and one != two
    assert model.get_text_embedding(texts[0]) == pytest.approx(one, abs=0.02)
