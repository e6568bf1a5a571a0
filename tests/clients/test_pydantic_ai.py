"""Pydantic AI against the embedded model: its classes for chat completions and for responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.clients.conftest import KEY

WHY = "needs Pydantic AI: pip install 'pydantic-ai-slim[openai]'"
pydantic_ai = pytest.importorskip("pydantic_ai", reason=WHY)
models = pytest.importorskip("pydantic_ai.models.openai", reason=WHY)
providers = pytest.importorskip("pydantic_ai.providers.openai", reason=WHY)

FRANCE = "What is the capital of France?"


class Place(BaseModel):
    """A place. Without additional properties, so that the embedded model cannot add properties without end."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["city", "river"]


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def options(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    provider = providers.OpenAIProvider(base_url=url, api_key=KEY)
    model = getattr(models, request.param)("default", provider=provider)
    return {"model": model, "model_settings": {"temperature": 0, "max_tokens": 80}}


def test_run_and_stream(options: dict[str, Any]) -> None:
    agent = pydantic_ai.Agent(**options)

    async def streamed() -> str:
        async with agent.run_stream(FRANCE) as run:
            return "".join([piece async for piece in run.stream_text(delta=True)])

    answer = agent.run_sync(FRANCE)
    assert "Paris" in answer.output and answer.output == asyncio.run(streamed())


@pytest.mark.parametrize("how", ["NativeOutput", "ToolOutput"])
def test_typed_answers(options: dict[str, Any], how: str) -> None:
    agent = pydantic_ai.Agent(output_type=getattr(pydantic_ai, how)(Place), **options)
    assert agent.run_sync(FRANCE).output.kind in ("city", "river")


def test_a_tool_is_called(options: dict[str, Any]) -> None:
    asked: list[str] = []
    agent = pydantic_ai.Agent(**options)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Weather of a city"""
        asked.append(city)
        return "sunny"

    agent.run_sync("What is the weather in Paris?")
    assert asked == ["Paris"]
