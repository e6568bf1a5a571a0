"""The README's quick start: the embedded model with default flags. Every option of the official client:
`tests/clients/test_openai.py`."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import openai
import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.planning.flags.validate_server import HIDDEN
from moe_engine.planning.output.launch_flags import launch_flags
from moe_engine.planning.prepare import prepare
from tests.e2e.server_process import ServerProcess

KEY = "secret"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    flags = ["--api-key", KEY, "--reasoning-parser", "deepseek-v3", "--tool-call-parser", "deepseekv31"]
    with ServerProcess(folder, *flags, "--enable-metrics", "--enable-cache-report") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def test_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=FRANCE, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_curl_line(server: ServerProcess) -> None:
    """The printed command, with the key inserted."""
    line = next(line for line in server.log.splitlines() if line.strip().startswith("curl"))
    found = subprocess.run(line, shell=True, env={"API_KEY": KEY, "PATH": "/usr/bin:/bin"}, capture_output=True)
    assert found.returncode == 0, found.stderr
    assert "Paris" in json.loads(found.stdout)["choices"][0]["message"]["content"]


def test_many_at_once_async(server: ServerProcess, client: openai.OpenAI) -> None:
    places = ["France", "Japan", "Peru", "Egypt", "Canada", "Norway"] * 4

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as asynchronous:
            asked = [
                asynchronous.completions.create(
                    model="default", prompt=f"The capital of {place} is", max_tokens=6, temperature=0
                )
                for place in places
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    answers = asyncio.run(ask_all())
    for place, text in zip(places, answers):
        assert text == answers[places.index(place)]
    assert "Paris" in answers[0] and "Tokyo" in answers[1]


def test_seed_makes_samples_repeat(client: openai.OpenAI) -> None:
    def draw(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="default", messages=FRANCE, temperature=8, seed=seed, n=3, max_tokens=12
        )
        return [choice.message.content for choice in answer.choices]

    first = draw(7)
    assert draw(7) == first
    assert draw(8) != first


def test_a_tool_by_the_clients_own_names(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    function = {"name": "fetch_weather", "description": "Get the weather of a city.", "parameters": schema}
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item,typeddict-item]
        temperature=0,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    called = choice.message.tool_calls[0].function  # type: ignore[union-attr]
    assert (called.name, json.loads(called.arguments)) == ("fetch_weather", {"place": "Paris"})


def test_an_enforced_tool(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("forecast", "history")]
    for choice, names in (("required", ["forecast", "history"]), ({"type": "function", **tools[1]}, ["history"])):
        answer = client.chat.completions.create(
            model="default", messages=FRANCE, tools=tools, tool_choice=choice, parallel_tool_calls=False,  # type: ignore[arg-type]
            temperature=1.5, max_tokens=200,
        )  # fmt: skip
        (call,) = answer.choices[0].message.tool_calls or ()
        assert answer.choices[0].finish_reason == "tool_calls" and call.function.name in names  # type: ignore[union-attr]
        jsonschema.validate(json.loads(call.function.arguments), schema)  # type: ignore[union-attr]


def test_prefix_cache_shows_in_usage(client: openai.OpenAI) -> None:
    for _ in range(2):
        answer = client.chat.completions.create(model="default", messages=FRANCE, temperature=0)
    details = answer.usage.prompt_tokens_details  # type: ignore[union-attr]
    assert details is not None and details.cached_tokens and details.cached_tokens > 0


def test_start_log_lines(server: ServerProcess) -> None:
    log = server.log
    for words in ("max_total_num_tokens=", "Load weight end.", "KV Cache is allocated.", "fired up and ready to roll"):
        assert words in log
    assert "Memory ledger" in log


def test_port_in_use_is_named(server: ServerProcess, tmp_path: Path) -> None:
    second = ServerProcess(tmp_path, "--port", str(server.port))
    assert second.process.wait(180) == 2
    assert str(server.port) in second.log and "Traceback" not in second.log


def test_checkpoint_is_as_deepseek_ships(tmp_path: Path) -> None:
    config = json.loads((CHECKPOINT_DIR / "config.json").read_text())
    index = json.loads((CHECKPOINT_DIR / "model.safetensors.index.json").read_text())["weight_map"]
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    layers = config["num_hidden_layers"]
    assert f"model.layers.{layers}.eh_proj.weight" in index
    assert "model.layers.1.mlp.experts.0.down_proj.weight_scale_inv" in index
    assert sum(f.stat().st_size for f in CHECKPOINT_DIR.parent.rglob("*") if f.is_file()) < 12 * 2**20


def test_the_flags_of_server_info_start_the_same_engine(server: ServerProcess) -> None:
    with server.client() as client:
        info = client.get("/get_server_info", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert info["attention_backend"] != "auto" != info["sampling_backend"]
    args = EngineArgs.from_kwargs()
    flags = {name: value for name, value in info.items() if name in args.flat() and value != HIDDEN}
    config = prepare(EngineArgs.from_kwargs(**flags))
    again = json.loads(json.dumps(launch_flags(config)))
    assert {name: again[name] for name in flags} == flags
