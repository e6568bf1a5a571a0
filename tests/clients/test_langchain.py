"""LangChain against the embedded model: an agent that calls a tool, structured answers, streams, batches."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, SecretStr

from tests.clients.conftest import KEY

WHY = "needs LangChain: pip install langchain langchain-openai"
openai_models = pytest.importorskip("langchain_openai", reason=WHY)
agents = pytest.importorskip("langchain.agents", reason=WHY)

FRANCE = "What is the capital of France?"


class Place(BaseModel):
    """A place. Without additional properties, so that the embedded model cannot add properties without end."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["city", "river"]
    population: Literal[1, 2, 3]


@pytest.fixture
def model(url: str) -> Any:
    return openai_models.ChatOpenAI(
        model="default", base_url=url, api_key=SecretStr(KEY), temperature=0, max_retries=0, max_tokens=100
    )


def test_invoke_stream_and_batch(model: Any) -> None:
    answer = model.invoke(FRANCE)
    assert "Paris" in answer.content and answer.response_metadata["finish_reason"] == "stop"
    assert (
        answer.usage_metadata["total_tokens"]
        == answer.usage_metadata["input_tokens"] + (answer.usage_metadata["output_tokens"])
    )
    chunks = list(model.stream(FRANCE, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    assert (
        sum((c.usage_metadata or {}).get("output_tokens", 0) for c in chunks) == answer.usage_metadata["output_tokens"]
    )
    capitals = {"Italy": "Rome", "Japan": "Tokyo", "Peru": "Lima"}
    found = model.batch([f"What is the capital of {country}?" for country in capitals])
    assert all(city in message.content for city, message in zip(capitals.values(), found, strict=True))


def test_the_loop_of_an_agent(model: Any) -> None:
    calls: list[str] = []

    def get_weather(city: str) -> str:
        """Weather of a city"""
        calls.append(city)
        return "sunny"

    agent = agents.create_agent(model, [get_weather])
    question = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
    messages = agent.invoke(question)["messages"]
    assert calls == ["Paris"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[1].tool_calls[0]["args"] == {"city": "Paris"} and messages[2].content == "sunny"
    assert messages[3].content and not messages[3].tool_calls
    streamed = [chunk for chunk, _ in agent.stream(question, stream_mode="messages")]
    assert calls == ["Paris", "Paris"]
    assert "".join(c.content for c in streamed if c.type == "AIMessageChunk") == messages[3].content


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_answers(model: Any, method: str) -> None:
    asked = model.with_structured_output(Place, method=method, include_raw=True)
    found = asked.invoke("Describe Paris as JSON.")
    if method == "json_mode":  # any JSON object
        assert found["raw"].content.startswith("{")
    else:
        assert isinstance(found["parsed"], Place), found


def test_chosen_tools_and_logprobs(model: Any) -> None:
    def multiply(a: int, b: int) -> int:
        """Multiplies."""
        return a * b

    forced = model.bind_tools([multiply], tool_choice="multiply", strict=True).invoke("3 times 4")
    (call,) = forced.tool_calls
    assert call["name"] == "multiply" and set(call["args"]) == {"a", "b"}
    entries = model.bind(logprobs=True, top_logprobs=2).invoke(FRANCE).response_metadata["logprobs"]["content"]
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries)


def test_responses_and_completions(url: str) -> None:
    model = openai_models.ChatOpenAI(
        model="default", base_url=url, api_key=SecretStr(KEY), temperature=0, max_retries=0, use_responses_api=True
    )
    assert "Paris" in model.invoke(FRANCE).text
    assert "Paris" in "".join(chunk.text for chunk in model.stream(FRANCE))
    plain = openai_models.OpenAI(model="default", base_url=url, api_key=SecretStr(KEY), temperature=0, max_tokens=8)
    assert "Paris" in plain.invoke("The capital of France is")


def test_embeddings(vectors_url: str) -> None:
    model = openai_models.OpenAIEmbeddings(
        model="default", base_url=vectors_url, api_key=SecretStr(KEY), check_embedding_ctx_length=False
    )
    texts = ["The capital of France is Paris.", "Seven plus four is eleven."]
    one, two = model.embed_documents(texts)
    assert sum(x * x for x in one) == pytest.approx(1, abs=1e-3)
    assert model.embed_query(texts[1]) == pytest.approx(two, abs=0.02)
