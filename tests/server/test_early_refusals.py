"""Frontend errors are reported while the cores load, not after minutes, and no process remains."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from moe_engine.cli.main import main
from moe_engine.cluster import node
from moe_engine.config.args import EngineArgs
from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.errors import ConfigError
from moe_engine.frontend import engine, start
from moe_engine.frontend.engine import Engine
from moe_engine.server import launch


@pytest.fixture
def cores_that_load_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(*_: object) -> None:
        raise AssertionError("the error came only after the weights were loaded")

    for module in (engine, launch):
        monkeypatch.setattr(module, "start_cores", lambda config: [])
        monkeypatch.setattr(module, "wait_ready", waited)


def broken(folder: Path, name: str, text: str) -> str:
    """A copy of the embedded checkpoint, with one of its files replaced."""
    shutil.copytree(CHECKPOINT_DIR, folder / "checkpoint")
    (folder / "checkpoint" / name).write_text(text)
    return str(folder / "checkpoint")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", '{"model": {}}', "cannot be read as a tokenizer"),
        ("chat_template.jinja", "{% for %}", "Expected an expression"),
        ("generation_config.json", '{"temperature": -1}', "temperature: expected a number >= 0"),
    ],
)
@pytest.mark.usefixtures("cores_that_load_for_ever")
def test_server(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        launch.serve(EngineArgs.from_kwargs(model_path=broken(tmp_path, name, text), port=0))


@pytest.mark.usefixtures("cores_that_load_for_ever")
def test_offline(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        Engine(model_path=broken(tmp_path, "tokenizer.json", '{"model": {}}'))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chat-template", "{% for %}"], "--chat-template: .*Expected an expression"),
        (["--chat-template", "{{ raise_exception('no users') }}"], "the chat template refuses them: no users"),
        (["--skip-tokenizer-init", "--raw"], "--skip-tokenizer-init: generate needs the tokenizer"),
    ],
)
@pytest.mark.usefixtures("cores_that_load_for_ever")
def test_one_prompt(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    assert main(["generate", "a prompt", *flags]) == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(("left", "words"), [(None, "has no tokenizer.json"), (0.5, "cannot be read as a tokenizer")])
def test_no_process_starts_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: float | None, words: str
) -> None:
    """Without the file, and with a part of it, as an interrupted download leaves it."""
    monkeypatch.setattr(start, "CoreProcess", lambda *_, **__: pytest.fail("a process has started"))
    folder = Path(broken(tmp_path, "chat_template.jinja", "{{ messages }}"))
    file = folder / "tokenizer.json"
    content = file.read_bytes()
    file.unlink()
    if left is not None:
        file.write_bytes(content[: int(len(content) * left)])
    for begin in (
        lambda: launch.serve(EngineArgs.from_kwargs(model_path=str(folder), port=0)),
        lambda: Engine(str(folder)),
    ):
        with pytest.raises(
            ConfigError, match=f"{words}.*--tokenizer-path, or serve token ids with --skip-tokenizer-init"
        ):
            begin()


def test_node_0_learns_why_another_node_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the node's ranks until the time limit of the start."""
    reported: list[tuple[str, str]] = []
    monkeypatch.setattr(node, "report_refusal", lambda address, keys, message: reported.append((address, message)))
    folder = Path(broken(tmp_path, "chat_template.jinja", "{{ messages }}"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    flags = {"tp_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:5000", "model_path": str(folder)}
    for rank in (0, 1):
        with pytest.raises(ConfigError, match="of 3 weight files missing"):
            launch.serve(EngineArgs.from_kwargs(node_rank=rank, **flags))
    ((address, message),) = reported
    assert address == "127.0.0.1:5000" and "model-00002-of-00003.safetensors of 3 weight files missing" in message
