"""The secret shared by nodes: its sources, refusals, and its absence from all output."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.executor.sharded_worker import fingerprint, rank_group_options
from moe_engine.planning.output.explain import explain_json, explain_text, start_lines
from moe_engine.planning.prepare import prepare
from moe_engine.processes.dist_secret import LEAST_CHARACTERS, SECRET_VARIABLE, DistSecret, find_secret

SECRET = "0123456789abcdef0123456789abcdef"
NODES = {"nnodes": 2, "tp_size": 2, "dist_init_addr": "127.0.0.1:20000"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "secret"
    made.write_text(SECRET + "\n")
    made.chmod(0o600)
    return made


def test_the_file_goes_before_the_variable(file: Path) -> None:
    assert find_secret({}, None) is None
    assert find_secret({SECRET_VARIABLE: "x" * 20}, None) == DistSecret(b"x" * 20)
    assert find_secret({SECRET_VARIABLE: "x" * 20}, str(file)) == DistSecret(SECRET.encode())


@pytest.mark.parametrize("text", ["", " \n", "x" * (LEAST_CHARACTERS - 1), f"  {'x' * (LEAST_CHARACTERS - 1)}\n"])
def test_a_short_secret_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / "secret").write_text(text)
    for environ, path, name in (
        ({}, str(tmp_path / "secret"), "--dist-secret-file"),
        ({SECRET_VARIABLE: text}, None, SECRET_VARIABLE),
    ):
        with pytest.raises(ConfigError, match=f"{name}.*{LEAST_CHARACTERS} characters") as caught:
            find_secret(environ, path)
        assert not text.strip() or text.strip() not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--dist-secret-file .*none: cannot be read: No such file"):
        find_secret({}, str(tmp_path / "none"))


def test_the_secret_is_never_shown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    for flags in ({}, {"dist_secret_file": str(file)}):
        config = prepare(EngineArgs.from_kwargs(**NODES, **flags))
        secret, options = config.parallel.secret, rank_group_options(config)
        assert secret == DistSecret(SECRET.encode()) and options is not None and options.keys is not None
        keys = [value.decode() for value in vars(options.keys).values()]
        shown = [
            repr(config), str(secret), repr(options), json.dumps(config.flat(), default=str),
            json.dumps(explain_json(config)), explain_text(config), *start_lines(config), str(fingerprint(config)),
        ]  # fmt: skip
        assert not any(hidden in text for hidden in (SECRET, *keys) for text in shown)
        assert pickle.loads(pickle.dumps(options.keys)).bind_public == options.keys.bind_public


def test_flags_of_all_nodes_are_compared_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprint crosses the network in messages of other nodes."""
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    without = fingerprint(prepare(EngineArgs.from_kwargs(**NODES)))
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert fingerprint(prepare(EngineArgs.from_kwargs(**NODES))) == without


def test_remarks(file: Path) -> None:
    one_node = prepare(EngineArgs.from_kwargs(dist_secret_file=str(file)))
    assert one_node.parallel.secret is None
    assert any("--dist-secret-file: no effect" in note for note in one_node.notes)
    assert not any(
        "chmod" in note for note in prepare(EngineArgs.from_kwargs(**NODES, dist_secret_file=str(file))).notes
    )
    file.chmod(0o644)
    notes = prepare(EngineArgs.from_kwargs(**NODES, dist_secret_file=str(file))).notes
    assert any("can be read by other users (mode 644): chmod 600" in note for note in notes)
