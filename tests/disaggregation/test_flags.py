"""Flags that cannot be combined with --disaggregation-mode, and fields of requests, are refused by name."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.core.kv_transfer.schema import difference
from moe_engine.core.kv_transfer.transports.mooncake import find_protocol
from moe_engine.core.kv_transfer.transports.table import open_transport
from moe_engine.errors import ConfigError, InputError
from moe_engine.frontend.disaggregated import apply_mode
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.prompts import split_prompts
from moe_engine.planning.flags import validate
from moe_engine.planning.flags.validate import check
from moe_engine.planning.remarks import flags_without_effect


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
    monkeypatch.setattr(validate, "installed", lambda module: module != extra)
    with pytest.raises(ConfigError, match=re.escape(f"{name}: {extra} is not installed; pip install -e '.[{extra}]'")):
        check(EngineArgs.from_cli(words))
    monkeypatch.setattr(validate, "installed", lambda module: True)
    monkeypatch.setattr(validate, "loadable", lambda library: True)
    check(EngineArgs.from_cli(words))
    monkeypatch.setattr(validate, "loadable", lambda library: False)
    if extra == "mooncake":
        with pytest.raises(ConfigError, match=f"{name}: mooncake needs the system's libibverbs"):
            check(EngineArgs.from_cli(words))


def test_the_delayer_of_prompts_is_refused_on_decode_servers() -> None:
    with pytest.raises(ConfigError, match="belongs to the prefill server"):
        check(EngineArgs.from_cli(["--disaggregation-mode", "decode", "--enable-prefill-delayer"]))
    check(EngineArgs.from_cli(["--disaggregation-mode", "prefill", "--enable-prefill-delayer"]))


def test_names_of_rdma_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake gets them; other transports have none, with a note; devices by GPU are refused."""
    calls: list[tuple[str, ...]] = []

    def initialize(*args: str) -> int:
        calls.append(args)
        return 0

    engine = SimpleNamespace(initialize=initialize, get_rpc_port=lambda: 5)
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    module = ModuleType("mooncake.engine")
    module.TransferEngine = lambda: engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    for devices in ("", "mlx5_0,mlx5_1"):
        open_transport("mooncake", "127.0.0.1", lambda peer, frames: None, devices)
        assert calls[-1] == ("127.0.0.1", "P2PHANDSHAKE", find_protocol(), devices)
    open_transport("tcp", "127.0.0.1", lambda peer, frames: None, "mlx5_0").close()
    plan = cast(Any, SimpleNamespace(topology=SimpleNamespace(tp_size=1), dispatch=None))
    for words, noted in (("", True), ("--disaggregation-transfer-backend mooncake", False)):
        args = EngineArgs.from_cli(["--disaggregation-ib-device", "mlx5_0", *words.split()])
        notes = [note for note in flags_without_effect(args, "cpu", plan) if "ib-device mlx5_0: no effect" in note]
        assert bool(notes) == noted
    monkeypatch.setattr(validate, "installed", lambda module: True)
    monkeypatch.setattr(validate, "loadable", lambda library: True)
    for value in ('{"0": "mlx5_0"}', "devices.json"):
        words = ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake"]
        with pytest.raises(ConfigError, match="devices by GPU are not supported; give names"):
            check(EngineArgs.from_cli([*words, "--disaggregation-ib-device", value]))


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
