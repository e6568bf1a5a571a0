"""Adapters in PEFT's format: files saved by PEFT, and refusals by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.config.lora import LoraEntry, lora_entries
from moe_engine.errors import ConfigError, MoeEngineError
from moe_engine.models.config_file import load_model_config
from moe_engine.models.lora_adapter import CONFIG_FILE, WEIGHTS_FILE, linear_shapes, read_adapter
from tests.models.checkpoints import make_checkpoint
from tests.models.lora import PREFIX, make_adapter, merge


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v2_lite", tmp_path_factory.mktemp("base") / "model", num_hidden_layers=2)


def test_what_is_read(base: Path, tmp_path: Path) -> None:
    path = make_adapter(
        tmp_path / "a", base, ("q_proj", "kv_b_proj"), 4, rank_pattern={"kv_b_proj": 2},
        alpha_pattern={r"layers\.1\.self_attn\.q_proj": 1}, use_rslora=True,
    )  # fmt: skip
    found = {m.name: (m.rank, m.scaling) for m in read_adapter(path, load_model_config(base)).modules}
    layer = "model.layers.{}.self_attn.{}".format
    assert found == {
        layer(0, "q_proj"): (4, 4.0), layer(1, "q_proj"): (4, 0.5),
        layer(0, "kv_b_proj"): (2, 8 / 2**0.5), layer(1, "kv_b_proj"): (2, 8 / 2**0.5),
    }  # fmt: skip


def test_modules_that_can_have_adapters(base: Path) -> None:
    names = linear_shapes(load_model_config(base))
    assert "model.layers.1.mlp.shared_experts.up_proj" in names and "model.layers.0.mlp.down_proj" in names
    assert not any(".experts." in name or name.endswith((".gate", "lm_head", "embed_tokens")) for name in names)


def test_delta_attention_has_adapters_of_its_output_alone(tmp_path: Path) -> None:
    """Its q, k and v are one product with rows in the order of heads."""
    base = make_checkpoint("kimi_linear", tmp_path / "model", tokenizer=False)
    config = load_model_config(base)
    outputs = read_adapter(make_adapter(tmp_path / "a", base, ("o_proj",)), config).modules
    assert len(outputs) == config.num_layers
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.k_proj.*of delta attention o_proj alone"):
        read_adapter(make_adapter(tmp_path / "b", base, ("k_proj",)), config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "use_dora True: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias 'all'"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"r": 0}, "r 0"),
        ({"lora_alpha": "8"}, "lora_alpha '8'"),
        ({"r": 5}, "expected \\[5, "),
    ],
)
def test_refused_configurations(base: Path, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    path = make_adapter(tmp_path / "a", base, ("q_proj",))
    config = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps(config | fields))
    with pytest.raises(MoeEngineError, match=words):
        read_adapter(path, load_model_config(base))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.1.mlp.experts.0.up_proj.lora_A.weight", "routed experts"),
        ("lm_head.lora_A.weight", "embedding and of lm_head"),
        ("model.embed_tokens.lora_embedding_A", "embedding and of lm_head"),
        ("model.layers.1.mlp.gate.lora_A.weight", "router"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight", "DoRA"),
        ("model.layers.9.self_attn.q_proj.lora_A.weight", "not a module of this model"),
    ],
)
def test_refused_modules(base: Path, tmp_path: Path, name: str, words: str) -> None:
    path = make_adapter(tmp_path / "a", base, ("q_proj",))
    tensors = load_file(path / WEIGHTS_FILE)
    save_file(tensors | {PREFIX + name: torch.zeros(4, 64)}, path / WEIGHTS_FILE)
    with pytest.raises(MoeEngineError, match=words):
        read_adapter(path, load_model_config(base))


def test_missing_files(base: Path, tmp_path: Path) -> None:
    with pytest.raises(MoeEngineError, match=r"adapter_config.json: No such file"):
        read_adapter(tmp_path / "nowhere", load_model_config(base))
    path = make_adapter(tmp_path / "a", base, ("q_proj",))
    (path / WEIGHTS_FILE).unlink()
    with pytest.raises(MoeEngineError, match=r"no adapter_model\.safetensors"):
        read_adapter(path, load_model_config(base))


def test_peft_saves_and_merges_the_same(base: Path, tmp_path: Path) -> None:
    """The file and the merged weights of PEFT."""
    peft = pytest.importorskip("peft")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    targets = ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(r=4, lora_alpha=3, use_rslora=True, target_modules=targets, rank_pattern={"o_proj": 2}),
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "a")
    adapter = read_adapter(tmp_path / "a", load_model_config(base))
    assert len(adapter.modules) == 2 * 4 and adapter.rank == 4
    ours = load_file(merge(base, tmp_path / "a", tmp_path / "merged") / "model.safetensors")
    theirs = adapted.merge_and_unload().state_dict()
    for module in adapter.modules:
        torch.testing.assert_close(ours[f"{module.name}.weight"], theirs[f"{module.name}.weight"], rtol=1e-5, atol=1e-6)


def test_flag_of_adapters() -> None:
    text = 'a=/x /y/z {"lora_name": "b", "lora_path": "/with space", "pinned": true} c=d=e'
    assert lora_entries(text) == [
        LoraEntry("a", "/x"), LoraEntry("/y/z", "/y/z"), LoraEntry("b", "/with space", True), LoraEntry("c", "d=e"),
    ]  # fmt: skip
    assert lora_entries(None) == []
    for wrong, words in (
        ("a=/x a=/y", "two adapters are named 'a'"),
        ('{"lora_name": "b"}', "an adapter is an object"),
        ("{oops", "not valid JSON"),
        ("=x", "expected NAME=PATH"),
    ):
        with pytest.raises(ConfigError, match=words):
            lora_entries(wrong)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_pipes_are_refused(base: Path, tmp_path: Path, name: str) -> None:
    """To open a pipe would block the thread that runs the steps."""
    path = make_adapter(tmp_path / "a", base, ("q_proj",))
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(MoeEngineError, match=name):
        read_adapter(path, load_model_config(base))


@pytest.mark.parametrize("inner", ["model.language_model.", "language_model.model."])
def test_names_of_models_for_images(tmp_path: Path, inner: str) -> None:
    """By transformers' names of the text model, as PEFT saves them, and by the published ones."""
    base = make_checkpoint("minimax_m3", tmp_path / "base", tokenizer=False)
    path = make_adapter(tmp_path / "a", base, ("q_proj",), 4)
    tensors = load_file(path / WEIGHTS_FILE)
    renamed = {name.replace("language_model.model.", inner): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / WEIGHTS_FILE)
    found = read_adapter(path, load_model_config(base))
    assert [module.name for module in found.modules] == [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]
    assert {found.tensor(module, part) for module in found.modules for part in "AB"} == set(renamed)


@pytest.mark.parametrize("parts", ["A", "B", "AB"])
def test_two_names_of_one_module(base: Path, tmp_path: Path, parts: str) -> None:
    """The text model of a checkpoint may be named in two ways; the second one's weights would be lost."""
    path = make_adapter(tmp_path / "a", base, ("q_proj",))
    tensors = load_file(path / WEIGHTS_FILE)
    stored = [PREFIX + inner + "layers.1.self_attn.q_proj" for inner in ("model.", "language_model.model.")]
    for part in parts:
        tensors[f"{stored[1]}.lora_{part}.weight"] = tensors[f"{stored[0]}.lora_{part}.weight"].clone()
    save_file(tensors, path / WEIGHTS_FILE)
    with pytest.raises(MoeEngineError) as refusal:
        read_adapter(path, load_model_config(base))
    assert all(f"{name}.lora_{part}.weight" in str(refusal.value) for name, part in zip(stored, "A" + parts[0]))
