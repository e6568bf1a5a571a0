"""EAGLE heads before a weight is read: detection of heads, and heads of other models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError, MoeEngineError
from moe_engine.models.checkpoint_files import read_head
from moe_engine.models.eagle_config import HeadConfig, head_tensors, read_head_config
from moe_engine.parallel.topology import Topology
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolve import ResolvedConfig
from moe_engine.planning.speculation.eagle_checks import check_sharding
from tests.models.checkpoints import make_checkpoint

TARGET = {"num_hidden_layers": 10}
FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "draft_vocab_size": 100, "torch_dtype": "float32",
    "tie_word_embeddings": False,
}  # fmt: skip
EAGLE2 = {"architectures": ["LlamaForCausalLMEagle"], "draft_vocab_size": None}
MLA = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 24}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("target"), **TARGET)


def write(folder: Path, file: str = "model.safetensors", **fields: Any) -> Path:
    """A head whose tensors have the names and shapes of its config, with the publisher's names."""
    folder.mkdir(exist_ok=True)
    config = {**FIELDS, **fields}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    is_eagle3 = any("3" in name for name in config["architectures"])
    size, count = config["hidden_size"], config["draft_vocab_size"]
    fc = {"fc.weight": torch.ones(size, (3 if is_eagle3 else 2) * size)}
    ids = {"d2t": torch.zeros(count, dtype=torch.int64), "lm_head.weight": torch.ones(count, size)} if count else {}
    save_file(
        {**fc, **ids, **({"midlayer.hidden_norm.weight": torch.ones(size)} if is_eagle3 else {})},
        folder / "a.safetensors",
    )
    head = read_head_config(folder, read_head(folder), TARGET["num_hidden_layers"])
    (folder / "a.safetensors").unlink()
    own = "midlayer." if is_eagle3 else "model.layers.0."
    tensors = {s.name.replace("model.layers.0.", own): torch.ones(s.shape) for s in head_tensors(head)} | ids
    save = save_file if file.endswith("safetensors") else torch.save
    save(tensors, folder / file)
    return folder


def start(target: Path, head: Path, algorithm: str = "EAGLE3", **flags: Any) -> ResolvedConfig:
    more = {"dtype": "float32", "max_total_tokens": 512, "max_running_requests": 4, "device": "cpu"}
    names = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(head)}
    return prepare(EngineArgs.from_kwargs(model_path=str(target), **more, **names, **flags))


def found(config: ResolvedConfig) -> HeadConfig:
    assert config.draft_head is not None and config.speculation is not None and config.speculation.method == "eagle"
    return config.draft_head


def test_heads_by_architecture_and_tensors(target: Path, tmp_path: Path) -> None:
    head = found(start(target, write(tmp_path / "a")))
    assert (head.tapped, head.own_head, head.has_ids, head.attention_input) == ((2, 5, 7), 100, True, 128)
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8], "use_aux_hidden_state": True}}
    assert found(start(target, write(tmp_path / "b", **ids))).tapped == (2, 5, 9)
    inputs = {"eagle_aux_hidden_state_layer_ids": [0, 4, 10]}  # as vLLM counts: the inputs of these layers
    assert found(start(target, write(tmp_path / "b", **inputs))).tapped == (0, 4, 10)
    assert found(start(target, write(tmp_path / "b", **inputs | ids))).tapped == (2, 5, 9)
    none = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True}}
    assert found(start(target, write(tmp_path / "b", **none))).tapped == (2, 5, 7)
    names = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4}
    assert found(start(target, write(tmp_path / "c", **names, **MLA))).layer.attention.kind == "mla"
    for names in (
        EAGLE2,
        {**EAGLE2, "architectures": ["LlamaForCausalLM"]},
        {**EAGLE2, "architectures": ["LlamaEagleForCausalLM"]},
    ):
        head = found(start(target, write(tmp_path / "d", **names), "EAGLE"))
        assert not head.is_eagle3 and head.draft_vocab == 320
        assert found(start(target, tmp_path / "d", "NEXTN")) == head
    assert found(start(target, write(tmp_path / "e", "pytorch_model.bin", **EAGLE2), "EAGLE")).layer.hidden_size == 64
    assert found(start(target, tmp_path / "a", load_format="dummy")).own_head == 100


def renamed(folder: Path, names: dict[str, str], file: str = "model.safetensors", **more: torch.Tensor) -> Path:
    """The head with beginnings of names replaced, and more tensors."""
    stored = folder / "model.safetensors"
    tensors = load_file(stored) | more
    stored.unlink()
    found = {}
    for name, tensor in tensors.items():
        old = next((old for old in names if name.startswith(old)), "")
        found[names.get(old, "") + name.removeprefix(old)] = tensor
    (torch.save if file.endswith(".bin") else save_file)(found, folder / file)
    return folder


EMBEDDING = {"embed_tokens.weight": torch.ones(320, 64)}
T2D = {"t2d": torch.ones(320, dtype=torch.bool)}
TAPS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8], "use_aux_hidden_state": True}}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, str], str, dict[str, torch.Tensor]]] = {
    "the authors' EAGLE-3": ({"architectures": ["LlamaForCausalLM"]}, {}, "pytorch_model.bin", T2D),
    "SpecForge": ({}, {}, "model.safetensors", EMBEDDING | T2D),
    "ModelOpt": (TAPS, {"midlayer.": "layers.0."}, "model.safetensors", T2D),
    "several layers": (
        {"num_hidden_layers": 3},
        {"midlayer.": "layers.0.", "model.layers.": "layers."},
        "model.safetensors",
        {"layers.2.hidden_norm.weight": torch.ones(64)},
    ),
    "under model.": (
        {},
        {"midlayer.": "model.layers.0.", "fc.": "model.fc.", "norm.": "model.norm."},
        "model.safetensors",
        {"model.embed_tokens.weight": EMBEDDING["embed_tokens.weight"]},
    ),
    "norms of each state, by older names": (
        {"use_aux_norm": True},
        {f"fc_norm.{i}.": f"aux_norm_{place}." for i, place in enumerate(("low", "mid", "high"))},
        "model.safetensors",
        {},
    ),
    "a norm before fc": ({"norm_before_fc": True}, {}, "model.safetensors", {}),
    "the authors' EAGLE-2": (
        {**EAGLE2, "architectures": ["LlamaForCausalLM"], "bias": True},
        {"model.layers.0.": "layers.0."},
        "pytorch_model.bin",
        EMBEDDING | {"fc.bias": torch.ones(64)},
    ),
    "with the state's norm before the residual, and no own head": (
        {"norm_before_residual": True, "draft_vocab_size": 320},
        {},
        "model.safetensors",
        {},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layouts(target: Path, tmp_path: Path, name: str) -> None:
    fields, names, file, more = LAYOUTS[name]
    is_eagle3 = "draft_vocab_size" not in fields or fields["draft_vocab_size"]
    written = {"architectures": FIELDS["architectures"]} if is_eagle3 else {}
    folder = renamed(write(tmp_path / "head", **fields | written), names, file, **more)
    if "architectures" in fields:
        config = json.loads((folder / "config.json").read_text()) | {"architectures": fields["architectures"]}
        (folder / "config.json").write_text(json.dumps(config))
    head = found(start(target, folder, "EAGLE3" if is_eagle3 else "EAGLE"))
    assert head.is_eagle3 == bool(is_eagle3) and head.has_bias == ("fc.bias" in more)
    assert head.norms_states == ("use_aux_norm" in fields) and head.norms_joined == ("norm_before_fc" in fields)
    assert head.norms_residual == ("norm_before_residual" in fields)


@pytest.mark.parametrize("layers", [1, 3])
def test_the_ledger_knows_weights_and_kv(target: Path, tmp_path: Path, layers: int) -> None:
    plain = start(target, write(tmp_path / "head", num_hidden_layers=layers), "EAGLE3")
    without = prepare(
        EngineArgs.from_kwargs(
            model_path=str(target), dtype="float32", max_total_tokens=512, max_running_requests=4, device="cpu"
        )
    )
    head = found(plain)
    weights = next(row for row in plain.ledger.rows if row.name == "draft weights")
    numbers = sum(spec.num_elements for spec in head_tensors(head))
    rotary = plain.limits.row_width * head.layer.rope.width
    assert weights.num_bytes == 4 * (numbers + rotary) + 8 * 100 and "EAGLE-3 head" in weights.detail
    kv = plain.ledger.bytes_per_token - without.ledger.bytes_per_token
    assert kv == layers * 2 * 2 * 16 * 4  # keys and values of two heads of 16 floats
    text = json.dumps([weights.detail])
    assert "100 of 320 tokens" in text


def test_several_layers_need_one_attention_group(target: Path, tmp_path: Path) -> None:
    head = found(start(target, write(tmp_path / "head", num_hidden_layers=2), "EAGLE3"))
    check_sharding(head, Topology(2))
    with pytest.raises(ConfigError, match="a head of 2 layers needs a single attention group, and --attn-dp-size is 2"):
        check_sharding(head, Topology(2, attn_dp_size=2))


REFUSED: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"hidden_size": 32}, "EAGLE3", ["for another model: its hidden_size is 32, and that of", "is 64"]),
    ({"vocab_size": 300}, "EAGLE3", ["its vocab_size is 300", "is 320"]),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 10]}}, "EAGLE3", ["layers 0 to 9"]),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 1, 3]}}, "EAGLE3", ["in their order"]),
    (
        {"architectures": ["Eagle3MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
        "EAGLE3",
        ["with experts"],
    ),
    ({"architectures": ["Eagle3FalconForCausalLM"]}, "EAGLE3", ["supported: those of Llama, Qwen, DeepSeek and Kimi"]),
    ({"transformer_layer_config": {}}, "EAGLE3", ["speculators"]),
    ({}, "EAGLE", ["an EAGLE-3 head", "use EAGLE3"]),
    (EAGLE2, "EAGLE3", ["an EAGLE head", "use EAGLE"]),
    ({}, "STANDALONE", ["an EAGLE-3 head; use --speculative-algorithm EAGLE3"]),
]


@pytest.mark.parametrize(("fields", "algorithm", "words"), REFUSED)
def test_heads_of_other_models_are_refused_by_name(
    target: Path, tmp_path: Path, fields: dict[str, Any], algorithm: str, words: list[str]
) -> None:
    head = write(tmp_path / "head", **EAGLE2 if fields is EAGLE2 else {})
    file = head / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {k: v for k, v in fields.items() if v is not None}))
    with pytest.raises(ConfigError) as caught:
        start(target, head, algorithm)
    for word in words:
        assert word in str(caught.value)


def test_missing_and_foreign_tensors_are_refused(target: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    head = write(tmp_path / "head")
    file = head / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if not k.endswith("o_proj.weight")}, file)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight \[64, 64\] is missing"):
        start(target, head)
    save_file({**tensors, "extra.weight": torch.ones(2)}, file)
    with pytest.raises(CheckpointError, match=r"extra\.weight belongs to no part of an EAGLE-3 head"):
        start(target, head)
    save_file({**tensors, "fc.weight": torch.ones(64, 128)}, file)
    with pytest.raises(CheckpointError, match=r"fc\.weight .* has shape \[64, 128\], not \[64, 192\]"):
        start(target, head)
    with pytest.raises(ConfigError, match="needs an EAGLE-3 head"):
        prepare(EngineArgs.from_kwargs(model_path=str(target), speculative_algorithm="EAGLE3", device="cpu"))


def test_token_maps(target: Path, tmp_path: Path) -> None:
    head, file = write(tmp_path / "head", **EAGLE2), tmp_path / "map.pt"
    torch.save([5, 3, 3, 9], file)
    assert found(start(target, head, "EAGLE", speculative_token_map=str(file))).draft_vocab == 3
    torch.save(torch.tensor([1, 2], dtype=torch.int32), file)
    assert found(start(target, head, "EAGLE", speculative_token_map=str(file))).draft_vocab == 2
    for saved, words in (
        ([1, 320], "token 320 is outside the model's vocabulary of 320"),
        ([], "no token ids"),
        ({"a": 1}, "must have token ids"),
        (Path("x"), "without running code"),
    ):
        torch.save(saved, file)
        with pytest.raises(MoeEngineError, match=words):
            start(target, head, "EAGLE", speculative_token_map=str(file))
    with pytest.raises(ConfigError, match="no such file"):
        start(target, head, "EAGLE", speculative_token_map=str(tmp_path / "none.pt"))
    with pytest.raises(ConfigError, match="drafts without one; drop the map"):
        args = {"speculative_algorithm": "NGRAM", "speculative_token_map": str(file)}
        prepare(EngineArgs.from_kwargs(model_path=str(target), device="cpu", **args))
