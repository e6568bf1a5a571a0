"""The MTP layer of Qwen3-Next, which transformers does not load, against transformers' decoder layer and the formula;
names and weights of its norms, which are stored less 1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.tensors.model import added
from tests.models import stepper
from tests.models.checkpoints import make_checkpoint, write_tensors
from tests.models.rows import all_rows
from tests.models.test_mtp import Drafter
from tests.models.test_parity import assert_close


def with_mtp_as_layer_1(path: Path, directory: Path) -> Path:
    """A copy whose layer 1, an attention layer, has the weights of the MTP layer."""
    shutil.copytree(path, directory)
    tensors = load_file(path / "model.safetensors")
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.layers.0.")}
    renamed = {name.replace("mtp.layers.0.", "model.layers.1."): tensor for name, tensor in layer.items()}
    write_tensors(directory, tensors | {name: tensor.clone() for name, tensor in renamed.items()})
    return directory


@torch.no_grad()
def reference(path: Path, folder: Path, ids: list[int]) -> tuple[Tensor, Tensor]:
    """The main model's hidden states [T, D] of all tokens except the last, and v [T, D] of the MTP layer after them."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, **options).model
    other = transformers.AutoModelForCausalLM.from_pretrained(with_mtp_as_layer_1(path, folder), **options).model
    tensors, eps = load_file(path / "model.safetensors"), model.config.rms_norm_eps

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + tensors[f"mtp.{name}.weight"])

    hidden = model(torch.tensor([ids[:-1]])).last_hidden_state[0]
    embedding = tensors["model.embed_tokens.weight"][ids[1:]]
    both = torch.cat((norm(embedding, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")), -1)
    x = (both @ tensors["mtp.fc.weight"].T)[None]
    positions = torch.arange(len(hidden))[None]
    mask = torch.full((1, 1, len(hidden), len(hidden)), float("-inf")).triu(1)
    v = other.layers[1](x, position_embeddings=other.rotary_emb(x, positions), attention_mask=mask)
    return hidden, norm(v[0], "norm")


@pytest.mark.parametrize("row", all_rows())
def test_mtp_layer(tmp_path: Path, row: str) -> None:
    path = make_checkpoint("qwen3_next", tmp_path / "own", 3, num_mtp_layers=1)
    ids = torch.randint(0, 256, (61,)).tolist()
    hidden, expected = reference(path, tmp_path / "other", ids)
    drafter = Drafter(path, row)
    batch = drafter.batch(ids[:40])
    own = drafter.main.model.forward(batch)
    assert_close(own, hidden[:40])
    first = drafter.draft(batch, ids[1:41], own)
    rest = drafter.batch(ids[40:60])
    second = drafter.draft(rest, ids[41:61], drafter.main.model.forward(rest))
    assert_close(torch.cat((first, second)), expected)


def test_names_of_the_mtp_layer(tmp_path: Path) -> None:
    """Tensors of the MTP layer are read under the names of DeepSeek's MTP layers; config.json does not list the
    layer."""
    path = make_checkpoint("qwen3_next", tmp_path, num_mtp_layers=1, tokenizer=False)
    file = path / "config.json"
    config = json.loads(file.read_text())
    del config["num_nextn_predict_layers"]
    file.write_text(json.dumps(config))
    assert load_model_config(path).num_nextn_predict_layers == 1
    names = read_checkpoint(path).keys()
    assert {"model.layers.3.eh_proj.weight", "model.layers.3.self_attn.q_proj.weight"} <= names
    assert not any(name.startswith("mtp.") for name in names)


def test_norms_are_stored_less_1(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_next", tmp_path, tokenizer=False)
    config, tensors = load_model_config(path), load_file(path / "model.safetensors")
    model = stepper.load(path).model
    for name, held in (
        ("model.layers.0.input_layernorm.weight", model._first_norm.weight),
        ("model.norm.weight", model.layers[-1].next_norm.weight),
        ("model.layers.0.linear_attn.norm.weight", model.layers[0].attention._weights.norm),
        ("model.layers.1.self_attn.q_norm.weight", model.layers[1].attention._q_norm.weight),
    ):
        torch.testing.assert_close(held - added(config, name), tensors[name])
