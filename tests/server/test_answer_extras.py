"""Fields of answers that a request or flag asks for (token ids, meta_info, sglext, usage of streams), and small flags
of the server: arguments of the chat template, forms of the request log, refused priorities."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_engine.errors import ConfigError
from moe_engine.server import request_log
from moe_engine.server.request_log import RequestLog, RequestLogSettings
from tests.server.fake_engine import FakeClient
from tests.server.harness import CHAT, events, post

IDS = {"return_token_ids": True}


def chat(fields: dict[str, Any], client: FakeClient | None = None, **settings: Any) -> Any:
    response = post(client or FakeClient(), "/v1/chat/completions", CHAT | fields, **settings)
    assert response.status_code == 200, response.text
    return response.json() if not fields.get("stream") else events(response)


def whole_ids(chunks: list[Any], name: str = "token_ids") -> list[int]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [token for choice in choices for token in choice.get(name, [])]


def test_token_ids_of_a_chat():
    client = FakeClient()
    answer = chat(IDS, client)
    (choice,) = answer["choices"]
    sent = client.requests[0]
    assert answer["prompt_token_ids"] == sent.prompt_ids, "where vLLM has them"
    assert choice["prompt_token_ids"] == sent.prompt_ids and choice["token_ids"] == choice["response_token_ids"]
    assert client.tokenizer.decode(choice["token_ids"]) == choice["message"]["content"]
    streamed = chat(IDS | {"stream": True})
    assert whole_ids(streamed) == whole_ids(streamed, "response_token_ids") == choice["token_ids"]
    assert [c["choices"][0]["prompt_token_ids"] for c in streamed if "prompt_token_ids" in c["choices"][0]] == [
        choice["prompt_token_ids"]
    ]
    assert [c["prompt_token_ids"] for c in streamed if "prompt_token_ids" in c] == [sent.prompt_ids]
    assert "prompt_token_ids" not in chat({})
    plain = chat({})["choices"][0]
    assert plain.keys() & {"prompt_token_ids", "token_ids", "response_token_ids", "meta_info"} == set()
    only_prompt = chat({"return_prompt_token_ids": True})["choices"][0]
    assert only_prompt["prompt_token_ids"] == choice["prompt_token_ids"] and "token_ids" not in only_prompt


def test_token_ids_of_a_completion():
    body = {"prompt": ["Hello", "Hello world"], "n": 2, **IDS}
    whole = post(FakeClient(), "/v1/completions", body).json()["choices"]
    streamed = events(post(FakeClient(), "/v1/completions", body | {"stream": True}))
    for choice in whole:
        mine = [c for chunk in streamed for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [token for c in mine for token in c["token_ids"]] == choice["token_ids"] != []
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert all("prompt_token_ids" not in c for c in mine[1:]) and "response_token_ids" not in choice
    assert whole[0]["prompt_token_ids"] != whole[2]["prompt_token_ids"]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"separate_reasoning": False}])
@pytest.mark.parametrize("parser", [None, "deepseek-r1"])
def test_every_delta_has_content_and_reasoning(fields: dict[str, Any], parser: str | None):
    """As in SGLang's and DeepSeek's streams, where clients read both attributes of every delta."""
    chunks = chat({"stream": True, **fields}, reasoning_parser=parser)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert len(deltas) > 3 and all(delta.keys() >= {"content", "reasoning_content"} for delta in deltas)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_logprobs_by_their_ids(stream: bool):
    """vLLM's field: texts of tokens may be equal or no Unicode."""
    body = {"return_tokens_as_token_ids": True, "return_token_ids": True, "stream": stream}

    def choices(path: str, fields: dict[str, Any]) -> list[Any]:
        response = post(FakeClient("🙂é a"), path, fields | body)
        answers = events(response) if stream else [response.json()]
        return [choice for answer in answers for choice in answer["choices"] if choice["logprobs"]]

    found = choices("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2})
    entries = [entry for choice in found for entry in choice["logprobs"]["content"]]
    ids = [token for choice in found for token in choice["token_ids"]]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in ids] != []
    assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])
    assert bytes(part for entry in entries for part in entry["bytes"]).decode().startswith("🙂é a")
    found = choices("/v1/completions", {"prompt": "Hello", "logprobs": 1})
    names = [name for choice in found for name in choice["logprobs"]["tokens"]]
    assert names == [f"token_id:{token}" for choice in found for token in choice["token_ids"]] != []


@pytest.mark.parametrize("asked", [None, False, True])
def test_special_tokens_of_the_tokenizer_are_left_out_on_request(asked: bool | None):
    """vLLM's field; the template of a conversation has them."""
    client = FakeClient()
    bos = client.tokenizer.encode("x")[0]
    assert bos == client.tokenizer.encode("y")[0]
    post(client, "/v1/completions", {"prompt": "Hello", "add_special_tokens": asked})
    post(client, "/v1/chat/completions", CHAT | {"add_special_tokens": asked})
    completion, conversation = (request.prompt_ids for request in client.requests)
    assert (completion[0] == bos) == (asked is not False)
    assert conversation.count(bos) == 1, "the template has it"


def test_meta_info_of_a_chat():
    (choice,) = chat({"return_meta_info": True})["choices"]
    assert choice["meta_info"]["completion_tokens"] > 0 and choice["meta_info"]["finish_reason"]["type"] == "stop"
    last = [c for chunk in chat({"return_meta_info": True, "stream": True}) for c in chunk["choices"]][-1]
    assert last["meta_info"]["completion_tokens"] == choice["meta_info"]["completion_tokens"]


@pytest.mark.parametrize("by_flag", [False, True])
def test_sglext(by_flag: bool):
    fields = {} if by_flag else {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
    flags = {"return_input_ids": True, "return_output_ids": True} if by_flag else {}
    fields |= {"return_cached_tokens_details": True, "n": 2}
    answer = chat(fields | IDS, **flags)
    ids = [choice["token_ids"] for choice in answer["choices"]]
    expected = {
        "cached_tokens_details": {"device": 2, "host": 0},
        "input_ids": answer["choices"][0]["prompt_token_ids"], "output_ids": ids,
    }  # fmt: skip
    assert answer["sglext"] == expected
    chunks = chat(fields | {"stream": True}, **flags)
    assert chunks[-1]["choices"] == [] and chunks[-1]["sglext"] == expected
    assert "sglext" not in chat({"return_spec_tokens_details": True})  # nothing to report without drafts


def test_a_chat_given_as_token_ids():
    client = FakeClient()
    (choice,) = chat(IDS | {"input_ids": [5, 7, 9]}, client)["choices"]
    assert client.requests[0].prompt_ids == [5, 7, 9] == choice["prompt_token_ids"]
    for ids in ([], [-1], [10**6]):
        refused = post(FakeClient(), "/v1/chat/completions", CHAT | {"input_ids": ids})
        assert refused.status_code == 400 and "input_ids" in refused.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_of_streams_by_default(path: str):
    body: dict[str, Any] = (CHAT if "chat" in path else {"prompt": "Hello"}) | {"stream": True}
    flag = {"stream_response_default_include_usage": True}
    for asked, by_flag, expected in ((None, {}, False), (None, flag, True), (False, flag, False), (True, {}, True)):
        options = {} if asked is None else {"stream_options": {"include_usage": asked}}
        chunks = events(post(FakeClient(), path, body | options, **by_flag))
        assert ("usage" in chunks[-1]) is expected


def test_default_arguments_of_the_chat_template(tmp_path: Path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mode }}"
    flags = {"chat_template": template, "default_chat_template_kwargs": json.dumps({"mode": " world"})}
    prompts = []
    for asked in ({}, {"chat_template_kwargs": {"mode": " there"}}):
        client = FakeClient()
        chat(asked, client, **flags)
        prompts.append(client.tokenizer.decode(client.requests[0].prompt_ids))
    assert prompts[0].endswith("world") and prompts[1].endswith("there")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, "open ."),
        ({"reasoning_effort": "none"}, "off none"),
        ({"reasoning_effort": "low"}, "on low"),
        ({"reasoning": {"effort": "none"}}, "off none"),
        ({"reasoning": {"effort": "high", "enabled": False}}, "off high"),
        ({"reasoning": {"effort": "high"}, "reasoning_effort": "low"}, "on high"),
        ({"reasoning": {"enabled": True}}, "on ."),
        ({"reasoning": {}, "reasoning_effort": "low"}, "on low"),
        ({"thinking": {"type": "enabled"}}, "on ."),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, "off low"),
        ({"thinking": False}, "off ."),
        ({"reasoning": {"enabled": True}, "reasoning_effort": "none"}, "on none"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"SWITCH": True}}, "on none"),
    ],
)
@pytest.mark.parametrize("switch", ["thinking", "enable_thinking"])
def test_effort_of_the_reasoning(switch: str, asked: dict[str, Any], expected: str):
    """The fields of OpenAI and of SGLang set the switch of either template family; `chat_template_kwargs` prevail."""
    asked = json.loads(json.dumps(asked).replace("SWITCH", switch))
    state = f"('on' if {switch} else 'off') if {switch} is defined else 'open'"
    template = f"{{{{ {state} }}}} {{{{ reasoning_effort or '.' }}}}"
    client = FakeClient()
    chat(asked, client, chat_template=template)
    assert client.tokenizer.decode(client.requests[0].prompt_ids) == expected


def test_earlier_reasoning_in_the_forms_of_clients():
    """vLLM's field and content parts reach the template as `reasoning_content`."""
    template = "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.content }}{% endfor %}"
    said = {"role": "assistant", "content": " there"}
    parts = [{"type": "thinking", "thinking": "Hello"}, {"type": "text", "text": " there"}]
    other = [{"type": "reasoning", "text": "Hello"}, {"type": "text", "text": " there"}]
    prompts = set()
    for message in (
        {**said, "reasoning_content": "Hello"},
        {**said, "reasoning": "Hello"},
        {**said, "reasoning_content": "Hello", "reasoning": "no"},
        {**said, "content": parts},
        {**said, "content": other},
    ):
        client = FakeClient()
        assert post(client, "/v1/chat/completions", {"messages": [message]}, chat_template=template).status_code == 200
        prompts.add(client.tokenizer.decode(client.requests[0].prompt_ids))
    assert len(prompts) == 1 and prompts.pop().startswith("Hello")
    refused = post(FakeClient(), "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert (refused.status_code, refused.json()["param"]) == (400, "messages[0].content[0].type")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [CHAT, {"prompt": "hi"}], ids=["chat", "completion"])
def test_request_id_is_vllms_name_of_rid(body: dict[str, Any], stream: bool):
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    asked = {**body, "request_id": "of-the-client", "stream": stream}
    assert '"id":"of-the-client"' in post(FakeClient(), path, asked).text
    assert '"id":"first"' in post(FakeClient(), path, {**asked, "rid": "first"}).text


def test_request_log_in_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "requests"
    flags = {"log_requests": True, "log_requests_format": "json", "log_requests_target": f"stdout {folder}"}
    post(FakeClient(), "/generate", {"text": "Hello", "rid": "r1"}, **flags)
    (file,) = folder.iterdir()
    lines = file.read_text().splitlines()
    found = [json.loads(line[line.index("{") :]) for line in lines]
    assert [line["event"] for line in found] == ["request.received", "request.finished"]
    assert found[0]["rid"] == "r1" and found[0]["sampling_params"]["max_new_tokens"] == 128
    assert found[1]["meta_info"]["prompt_tokens"] == 2
    assert [line for line in capsys.readouterr().out.splitlines() if "request." in line] == lines
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"--log-requests-target .*file: cannot be written: it is a file; name a folder"
    ):
        RequestLog(RequestLogSettings(targets=(str(tmp_path / "file"),)))


def test_servers_with_one_folder_lose_no_hour_of_their_request_logs(tmp_path: Path):
    """Both rotate the file of the hour; so does one server after its clock was set back."""
    servers = [request_log._file_handler(str(tmp_path)) for _ in range(2)]
    lines = []
    for hour in range(3):
        for number, server in enumerate(servers):
            lines.append(f"hour {hour} of server {number}")
            server.emit(logging.makeLogRecord({"msg": lines[-1]}))
        for server in servers:
            server.doRollover()
    for server in servers:
        server.close()
    found = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert sorted(found) == sorted(lines)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_request_log_on_a_full_disk(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Requests are answered; the log has one line at the first lost line, and one when the disk has room again."""
    file = tmp_path / f"{socket.gethostname()}.log"
    file.symlink_to("/dev/full")
    log = logging.Logger("server")
    log.addHandler(caplog.handler)
    monkeypatch.setattr(request_log, "logger", log)
    flags = {"log_requests": True, "log_requests_format": "json", "log_requests_target": str(tmp_path)}
    for _ in range(2):
        assert post(FakeClient(), "/generate", {"text": "Hello"}, **flags).status_code == 200
    file.unlink()
    assert post(FakeClient(), "/generate", {"text": "Hello"}, **flags).status_code == 200
    assert len(file.read_text().splitlines()) == 2
    first, last = caplog.messages
    assert "cannot be written (No space left on device)" in first and "written again, 4 lines" in last
    assert "Traceback" not in capsys.readouterr().err


CUT = """
import logging, resource, sys
from pathlib import Path
from moe_engine.server.request_log import _HourFiles
log = _HourFiles(sys.argv[1])
for number in range(3):
    log.emit(logging.makeLogRecord({"msg": f"line {number}"}))
    size = Path(log.baseFilename).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, -1))  # as a disk with room for five more bytes
    for _ in range(2):
        log.emit(logging.makeLogRecord({"msg": "x" * 100}))
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
log.close()
"""


def test_a_line_of_the_request_log_that_was_cut_spoils_no_other(tmp_path: Path):
    subprocess.run([sys.executable, "-c", CUT, str(tmp_path)], check=True, timeout=120)
    (file,) = tmp_path.iterdir()
    assert file.read_text().splitlines() == ["line 0", "xxxxx", "line 1", "xxxxx", "line 2", "xxxxx"]


def test_priorities_are_refused_while_they_have_no_effect():
    body, flag = {"text": "Hello", "priority": 3}, {"abort_on_priority_when_disabled": True}
    assert post(FakeClient(), "/generate", body).status_code == 200
    refused = post(FakeClient(), "/generate", body, **flag)
    assert refused.status_code == 400 and "--enable-priority-scheduling" in refused.text
    assert post(FakeClient(), "/generate", body, **flag, uses_priority=True).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_include_stop_str_in_output_is_no_stop_trim(path: str):
    body = CHAT if "chat" in path else {"prompt": "hi", "max_tokens": 50}
    stop = {"stop": ["how"]}
    trimmed, vllm, sglang = (
        post(FakeClient("Hello world, how are you today?"), path, body | stop | more).json()["choices"][0]
        for more in ({}, {"include_stop_str_in_output": True}, {"no_stop_trim": True})
    )
    assert vllm == sglang != trimmed
