"""MiniMax-M3's MTP layers: against transformers' decoder layer, with the formula of vLLM's model around it in float64
(transformers has no MTP for this model); names, refusals."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from tests.models.checkpoints import BLOCK_SPARSE, make_checkpoint, write_tensors
from tests.models.quantized_floats import FLOATS
from tests.models.rows import all_rows
from tests.models.test_mtp import Drafter
from tests.models.test_parity import assert_close

LENGTH, MAIN = 80, 3
ROOT = "language_model.model."


class Oracle:
    """transformers' layers in float64, with the MTP layers as further ones, and a text of ten blocks."""

    def __init__(self, path: Path, folder: Path, count: int) -> None:
        import transformers

        self.path, self.tensors = path, {name: t.double() for name, t in load_file(path / "model.safetensors").items()}
        shutil.copytree(path, folder)
        renamed = {name.replace("transformer_layer.", ""): tensor for name, tensor in self.tensors.items()}
        for i in range(count):
            renamed = {name.replace(f"mtp.layers.{i}.", f"layers.{MAIN + i}."): t for name, t in renamed.items()}
        write_tensors(folder, renamed)
        raw = json.loads((folder / "config.json").read_text())
        text = raw["text_config"]
        text["num_hidden_layers"] = MAIN + count
        text["moe_layer_freq"] += [1] * count
        for name in ("sparse_attention_freq", "sparse_disable_index_value"):
            text["sparse_attention_config"][name] += [1] * count
        (folder / "config.json").write_text(json.dumps(raw))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self.text = model.model.language_model
        self.layers, self.text.layers = self.text.layers[MAIN:], self.text.layers[:MAIN]
        self.tokens = [random.randrange(250) for _ in range(LENGTH + 1)]
        with torch.no_grad():
            self.hidden = self.text(torch.tensor([self.tokens[:-1]]), use_cache=False).last_hidden_state[0]

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.text.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + self.tensors[f"{ROOT}{name}.weight"])

    @torch.no_grad()
    def layer(self, index: int, next_ids: list[int], hidden: Tensor) -> Tensor:
        """v [T, D] of a text from its start."""
        own = f"mtp.layers.{index}."
        embedding = self.tensors[f"{ROOT}embed_tokens.weight"][next_ids]
        both = torch.cat((self.norm(embedding, f"{own}enorm"), self.norm(hidden, f"{own}hnorm")), -1)
        z = (both @ self.tensors[f"{ROOT}{own}eh_proj.weight"].T)[None]
        positions = torch.arange(len(next_ids))[None]
        mask = torch.full((len(next_ids),) * 2, torch.finfo(z.dtype).min, dtype=z.dtype).triu(1)[None, None]
        rotary = self.text.rotary_emb(z, positions)
        out = self.layers[index](z, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        out = out[0] if isinstance(out, tuple) else out
        return self.norm(out.view(len(next_ids), -1), f"{own}final_layernorm")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("mtp")
    path = make_checkpoint(BLOCK_SPARSE, folder / "own", random.randrange(2**31), num_mtp_layers=2, tokenizer=False)
    return Oracle(path, folder / "further", 2)


@pytest.mark.parametrize("row", all_rows())
def test_layers_equal_the_reference(oracle: Oracle, row: str) -> None:
    """A prompt beyond the selected blocks as a whole; chunks and decodes."""
    tokens = oracle.tokens
    v = oracle.layer(0, tokens[1:], oracle.hidden)
    drafter = Drafter(oracle.path, row)
    assert drafter.mtp.num_layers == 2
    got = drafter.step(tokens, 0, LENGTH)
    assert_close(got, v.float())
    parts, other = [], Drafter(oracle.path, row)
    for start, stop in ((0, 40), (40, 70), (70, 71), (71, LENGTH)):
        parts.append(other.step(tokens, start, stop, decode=stop == start + 1))
    assert_close(torch.cat(parts), v.float())


def test_the_second_layer(oracle: Oracle) -> None:
    tokens, drafter = oracle.tokens, Drafter(oracle.path)
    batch = drafter.batch(tokens[:LENGTH])
    hidden = drafter.main.model.forward(batch)
    got = drafter.draft(batch, tokens[1:], hidden, 1)
    assert_close(got, oracle.layer(1, tokens[1:], oracle.hidden).float())


def test_names(oracle: Oracle, tmp_path: Path) -> None:
    """Without drafts the layers are not read; with them a missing tensor is named."""
    config, tensors = load_model_config(oracle.path), load_file(oracle.path / "model.safetensors")
    assert config.num_nextn_predict_layers == 2
    shutil.copytree(oracle.path, tmp_path / "model")
    name = f"{ROOT}mtp.layers.1.transformer_layer.self_attn.index_k_proj.weight"
    write_tensors(tmp_path / "model", {key: tensor for key, tensor in tensors.items() if key != name})
    files = read_checkpoint(tmp_path / "model")
    check_headers(tmp_path / "model", files, config)
    with pytest.raises(CheckpointError, match=r"layers\.4\.self_attn\.index_k_proj"):
        check_headers(tmp_path / "model", files, config, include_mtp=True)


@pytest.mark.parametrize("name", ["mxfp8", "modelopt mxfp8"])
def test_mxfp8_checkpoints(oracle: Oracle, name: str, tmp_path: Path) -> None:
    """As published: the projections of the MTP layers' inputs, norms and routers are not quantized."""
    tensors = load_file(oracle.path / "model.safetensors")
    plain_names = ("eh_proj", "embed_tokens", "lm_head", "vision", "projector", "patch_merge", ".gate.weight", "norm")
    chosen = [n for n, t in tensors.items() if t.dim() == 2 and not any(part in n for part in plain_names)]
    assert any("mtp" in n for n in chosen) and any("index_q_proj" in n for n in chosen)
    write, settings = FLOATS[name]
    stored, values = dict(tensors), dict(tensors)
    for key in chosen:
        written, values[key] = write(tensors[key])
        del stored[key]
        stored |= {key.removesuffix(".weight") + end: tensor for end, tensor in written.items()}
    found = []
    for folder, own in (("q", stored), ("plain", values)):
        shutil.copytree(oracle.path, tmp_path / folder)
        write_tensors(tmp_path / folder, own)
        if folder == "q":
            raw = json.loads((tmp_path / folder / "config.json").read_text())
            raw["quantization_config"] = settings
            (tmp_path / folder / "config.json").write_text(json.dumps(raw))
            config = load_model_config(tmp_path / folder)
            check_headers(tmp_path / folder, read_checkpoint(tmp_path / folder), config, include_mtp=True)
        found.append(Drafter(tmp_path / folder, "cpu").step(oracle.tokens, 0, LENGTH))
    assert_close(*found)
