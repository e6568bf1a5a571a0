"""The table of tensors equals the models' requests; all differences of headers are reported at once, without torch."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.models import registry
from moe_engine.models.checkpoint.cut import UNCUT, Cut
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.drafts.mtp import MTPLayers
from moe_engine.models.dummy_weights import DummyReader
from moe_engine.models.header_check import check_headers
from moe_engine.models.tensor_names import TensorNames
from moe_engine.models.tensors.model import Kind, model_tensors, names_outside_model, names_outside_mtp, table_names
from moe_engine.parallel.context import SINGLE
from tests.models import stepper
from tests.models.checkpoints import KINDS, MORE_KINDS, make_checkpoint
from tests.models.deepseek_v41 import make_v41
from tests.models.kimi_k3 import make_k3
from tests.models.v4_dspark import make_dspark
from tests.models.v41_dspark import make_v41_dspark


class Recorder(DummyReader):
    """Records the tensors that a model requests: name -> (shape, whether FP8 is allowed, dtype in memory)."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.asked: dict[str, tuple[tuple[int, ...], bool, bool]] = {}

    def tensor(self, name: str, shape: tuple[int, ...], cut: Cut = UNCUT, **options: Any) -> Tensor:
        self.asked.setdefault(name, (tuple(shape), False, "dtype" in options))
        return super().tensor(name, shape, cut, **options)

    def linear(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT, **options: Any) -> Tensor:
        self.asked[f"{prefix}.weight"] = (tuple(shape), True, False)
        return super().linear(prefix, shape, cut, **options)


BIASES = {"attention_bias": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in [*KINDS, *MORE_KINDS]),
    *((kind, {"tie_word_embeddings": True}) for kind in ("deepseek_v2", "qwen3")),
    *((kind, BIASES) for kind in ("deepseek_v3", "deepseek_v2_lite", "qwen3_moe")),
    ("llama", BIASES | {"mlp_bias": True}),
    ("deepseek_v3", {"n_shared_experts": 0}),
    ("deepseek_v3", {"num_mtp_layers": 2}),
    ("qwen3_next", {"num_mtp_layers": 1}),
    ("hy_v3", {"num_mtp_layers": 1}),
    ("longcat_flash", {"num_mtp_layers": 1}),
    ("ernie4_5_moe", {"num_mtp_layers": 1}),
    ("step3p7", {"num_mtp_layers": 2}),
    ("nemotron_h", {"num_mtp_layers": 2}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_table_is_what_models_ask_for(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    path = make_checkpoint(kind, tmp_path, tokenizer=False, **options)
    config = load_model_config(path)
    reader, backends = Recorder(), stepper.make_backends(config)
    model = registry.find([config.architecture]).model_class()(config, reader, backends, SINGLE)
    if config.num_nextn_predict_layers:
        MTPLayers(model, reader)
    table = {
        name: (spec.shape, spec.kind is Kind.LINEAR, spec.kind is Kind.WIDE)
        for spec in model_tensors(config, include_mtp=True)
        for name in spec.names()
    }
    assert table == reader.asked
    check_headers(path, read_checkpoint(path), config, include_mtp=True)


@pytest.mark.parametrize("scale_dtype", ["float32", "e8m0", "uint8"])
def test_fp8_checkpoints_pass(tmp_path: Path, scale_dtype: str) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path, fp8=True, scale_dtype=scale_dtype, num_mtp_layers=1)
    for include_mtp in (False, True):
        check_headers(path, read_checkpoint(path), load_model_config(path), include_mtp)


def complaint(path: Path, include_mtp: bool = False, **overrides: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        check_headers(path, read_checkpoint(path), load_model_config(path, overrides), include_mtp)
    return str(error.value)


Tensors = dict[str, Tensor]
GATE = "model.layers.1.mlp.gate.weight"
EXPERT = "model.layers.2.mlp.experts.7.up_proj.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(GATE), ["1 tensors", f"{GATE} [16, 64] is missing"]),
        (lambda t: t.update({GATE: torch.ones(64, 16)}), [GATE, "has shape [64, 16], not [16, 64]"]),
        (lambda t: t.update({EXPERT: torch.ones(32, 64, dtype=torch.int8)}), [EXPERT, "dtype I8", "BF16"]),
        (lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn)}), [GATE, "dtype F8_E4M3", "weight_scale_inv"]),
        (lambda t: t.pop(O_PROJ + "_scale_inv"), [O_PROJ, "F8_E4M3", "weight_scale_inv with it"]),
        (lambda t: t.update({O_PROJ + "_scale_inv": torch.ones(2, 1)}), ["_scale_inv", "[2, 1], not [1, 1]"]),
        (lambda t: t.update({O_PROJ + "_scale_inv": torch.ones(1, 1).half()}), ["_scale_inv", "dtype F16"]),
        (lambda t: t.update({"model.extra": torch.ones(2)}), ["model.extra", "belongs to no layer"]),
        (lambda t: [t.pop(n) for n in list(t) if ".2.mlp.experts." in n], ["48 tensors", "and 43 more"]),
        (lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), GATE: torch.ones(1)}),
         ["1 tensors", GATE, "model.safetensors", "config.json"]),
    ],
)  # fmt: skip
def test_what_differs_is_named(tmp_path: Path, edit: Callable[[Tensors], object], words: list[str]) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path, fp8=True, tokenizer=False)
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    text = complaint(path)
    assert all(word in text for word in words), text


def test_layers_beyond_the_config(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path, num_mtp_layers=1, tokenizer=False)
    check_headers(path, read_checkpoint(path), load_model_config(path, {"num_hidden_layers": 2}))
    assert "model.layers.4.input_layernorm.weight [64] is missing" in complaint(path, num_hidden_layers=5)
    assert "model.layers.4.enorm.weight" in complaint(path, include_mtp=True, num_nextn_predict_layers=2)
    fields = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 2}
    (path / "config.json").write_text(json.dumps(fields))
    assert "model.layers.2." in complaint(path) and "belongs to no layer" in complaint(path)


def test_a_head_that_differs_from_the_embedding_is_not_tied(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, tokenizer=False)
    tensors = load_file(path / "model.safetensors")
    assert "lm_head.weight in model.safetensors differs from" in complaint(path, tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    tied = load_model_config(path, {"tie_word_embeddings": True})
    check_headers(path, read_checkpoint(path), tied)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, path / "model.safetensors")
    assert "tie_word_embeddings" in complaint(path, tie_word_embeddings=True)


def test_outside_models_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint("llama", tmp_path, tokenizer=False)
    fields = json.loads((path / "config.json").read_text()) | {"hidden_size": 128}
    (path / "config.json").write_text(json.dumps(fields))
    complaint(path)
    monkeypatch.setattr(registry, "_architectures", dict(registry._architectures))
    registry.register("LlamaForCausalLM", "somewhere.else:Model")
    check_headers(path, read_checkpoint(path), load_model_config(path))


def test_a_bad_checkpoint_is_refused_without_torch(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, path / "model.safetensors")
    code = (
        f"import sys, moe_engine.cli.main as c; code = c.main(['plan', '--model-path', {str(path)!r}]); "
        "print('torch' in sys.modules, code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "False 2" and "model.norm.weight" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "make", [make_v41, make_k3, partial(make_checkpoint, "qwen4_exp", num_mtp_layers=1)], ids=["v4.1", "k3", "qwen4"]
)
def test_calls_by_name_pass_over_what_a_load_passes_over(tmp_path: Path, make: Callable[..., Path]) -> None:
    """Tables of n-grams, biases for images without a tower, scores of one row, MTP layers that are not loaded."""
    path = make(tmp_path, seed=random.randrange(1 << 30))
    config, files = load_model_config(path), read_checkpoint(path)
    outside = names_outside_model(config, files)
    assert outside and TensorNames(config, include_mtp=False).check("all tensors", files) == files.keys() - outside


@pytest.mark.parametrize(
    "make", [make_v41_dspark, make_dspark, partial(make_checkpoint, "qwen4_exp", num_mtp_layers=1)]
)
def test_calls_by_name_pass_over_what_no_draft_layer_needs(tmp_path: Path, make: Callable[..., Path]) -> None:
    """Of layers that draft: biases for images, heads of confidence."""
    path = make(tmp_path, seed=random.randrange(1 << 30))
    config, files = load_model_config(path), read_checkpoint(path)
    outside = names_outside_model(config, files) & names_outside_mtp(config, files)
    assert TensorNames(config, include_mtp=True).check("all tensors", files) == files.keys() - outside


@pytest.mark.parametrize("make", [make_v41, partial(make_checkpoint, "qwen4_exp")], ids=["v4.1", "qwen4"])
def test_tables_under_other_names_are_refused(tmp_path: Path, make: Callable[..., Path]) -> None:
    """Tensors that a trainer announces keep their names: a table that no layer would find is unknown."""
    path = make(tmp_path, seed=random.randrange(1 << 30))
    files = read_checkpoint(path)
    renamed = {f"model.language_{name}": files[name] for name in table_names(files)}
    with pytest.raises(CheckpointError, match="is no tensor of the served model"):
        TensorNames(load_model_config(path), include_mtp=False).check("tables", renamed)
