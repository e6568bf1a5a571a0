"""The official `ollama` client against the embedded model; skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess

ollama = pytest.importorskip("ollama", reason="needs the ollama client")


def test_list_show_chat_and_generate(tmp_path: Path, forked_processes: None) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    with ServerProcess(tmp_path, "--served-model-name", "demo", "--cpu-threads", "1") as server:
        client = ollama.Client(host=server.url)
        (listed,) = client.list().models
        assert listed.model == "demo" and "tools" in client.show("demo").capabilities
        options = {"temperature": 0}
        answer = client.chat("demo", [question], options=options)
        assert "Paris" in answer.message.content and answer.done_reason == "stop" and answer.eval_count > 2
        streamed = client.chat("demo", [question], options=options, stream=True)
        assert "".join(part.message.content for part in streamed) == answer.message.content
        assert "Paris" in client.generate("demo", question["content"], options=options).response
        schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
        assert "sure" in client.chat("demo", [question], format=schema, options=options).message.content

        def get_weather(city: str) -> str:
            """Weather of a city.

            Args:
                city: its name.
            """
            return city

        asked = [{"role": "user", "content": "What is the weather in Paris?"}]
        (call,) = client.chat("demo", asked, tools=[get_weather], options=options).message.tool_calls
        assert call.function.name == "get_weather" and call.function.arguments["city"] == "Paris"
        with pytest.raises(ollama.ResponseError, match=r"options\.temperature"):
            client.chat("demo", [question], options={"temperature": -1})
