"""Users' models are registered without changes of the source."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from moe_engine.errors import ConfigError
from moe_engine.models import load_model_config, register, registry
from tests.models import stepper
from tests.models.checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def keep_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_architectures", dict(registry._architectures))
    yield


def rename(path: Path, architecture: str) -> Path:
    config = json.loads((path / "config.json").read_text()) | {"architectures": [architecture]}
    (path / "config.json").write_text(json.dumps(config))
    return path


def outside_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    from moe_engine.models.families.dense import DenseModel

    module = types.ModuleType("outside_model")

    class OutsideModel(DenseModel):
        pass

    module.OutsideModel = OutsideModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "outside_model", module)
    return module


def test_register_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = outside_module(monkeypatch)
    path = rename(make_checkpoint("llama", tmp_path), "OutsideForCausalLM")
    with pytest.raises(ConfigError, match="register"):
        load_model_config(path)
    register("OutsideForCausalLM", "outside_model:OutsideModel")
    assert isinstance(stepper.load(path).model, module.OutsideModel)


def test_default_parser_recognizes_mla(tmp_path: Path) -> None:
    path = rename(make_checkpoint("deepseek_v2", tmp_path), "OutsideForCausalLM")
    register("OutsideForCausalLM", "nowhere:Model")
    assert load_model_config(path).attention.kind == "mla"


def test_own_parser(tmp_path: Path) -> None:
    def parser(fields: Any, generation: Any) -> Any:
        return fields.raw["vocab_size"], generation["eos_token_id"]

    path = rename(make_checkpoint("llama", tmp_path), "OutsideForCausalLM")
    register("OutsideForCausalLM", "nowhere:Model", parser)
    assert load_model_config(path) == (320, 257)


def test_broken_entry_point_is_reported_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    point = EntryPoint("theirs", "nowhere.at_all:setup", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_entry_points_loaded", False)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert load_model_config(make_checkpoint("llama", tmp_path)).architecture == "LlamaForCausalLM"
    assert "theirs" in caplog.text and "nowhere" in caplog.text


def test_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = outside_module(monkeypatch)
    point = EntryPoint("OutsideForCausalLM", "outside_model:OutsideModel", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_entry_points_loaded", False)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    path = rename(make_checkpoint("llama", tmp_path), "OutsideForCausalLM")
    assert isinstance(stepper.load(path).model, module.OutsideModel)
    assert "OutsideForCausalLM" in registry.supported()
