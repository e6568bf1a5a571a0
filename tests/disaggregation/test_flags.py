"""Flags that cannot be combined with --disaggregation-mode, and fields of requests, are refused by name."""

from __future__ import annotations

import re

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.core.kv_transfer.schema import difference
from moe_engine.errors import ConfigError, InputError
from moe_engine.frontend.disaggregated import apply_mode
from moe_engine.frontend.generate_input import GenerateInput, split_prompts
from moe_engine.planning import validate
from moe_engine.planning.validate import check


@pytest.mark.parametrize(
    "words",
    [
        "--disable-radix-cache", "--disaggregation-transfer-backend mori",
        "--kv-connector a:B", "--disaggregation-bootstrap-port 0",
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_flags_are_refused(words: str, mode: str) -> None:
    with pytest.raises(ConfigError, match=words.split()[0]):
        check(EngineArgs.from_cli(["--disaggregation-mode", mode, *words.split()]))


@pytest.mark.parametrize(("name", "extra"), [("nixl", "nixl"), ("mooncake", "mooncake"), ("mooncake_tcp", "mooncake")])
def test_absent_libraries_are_named(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", name]
    monkeypatch.setattr(validate, "_installed", lambda module: module != extra)
    with pytest.raises(ConfigError, match=re.escape(f"{name}: {extra} is not installed; pip install '.[{extra}]'")):
        check(EngineArgs.from_cli(words))
    monkeypatch.setattr(validate, "_installed", lambda module: True)
    check(EngineArgs.from_cli(words))


def test_fields_are_checked() -> None:
    ids = {"input_ids": [[1, 2], [3, 4]]}
    with pytest.raises(InputError, match="a room for each prompt"):
        split_prompts(GenerateInput(**ids, bootstrap_room=5, bootstrap_host="a"))
    with pytest.raises(InputError, match="bootstrap_host"):
        split_prompts(GenerateInput(**ids, bootstrap_room=[5, 6]))
    prompts, _ = split_prompts(
        GenerateInput(**ids, bootstrap_room=[5, 6], bootstrap_host=["[::1]", "b"], bootstrap_port=[None, 7])
    )
    assert [prompt.bootstrap for prompt in prompts] == [("::1", 0, 5), ("b", 7, 6)]
    with pytest.raises(InputError, match=re.escape("--disaggregation-mode")):
        apply_mode("null", prompts)


def test_differences_name_both_sides() -> None:
    assert difference({"a": "1"}, {"a": "1"}) is None
    assert difference({"a": "1"}, {"a": "2"}) == "a: prefill server 1, decode server 2"
    assert difference({"a": "1"}, {}) == "a: prefill server 1, decode server missing"
