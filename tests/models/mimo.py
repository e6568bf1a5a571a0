"""MiMo-7B: a random Qwen2 checkpoint with MiMo's MTP layer, and an oracle. transformers has no class of it: Qwen2's
model is the reference, and its layer alone that of the MTP layer, with vLLM's formula of input and states
(`mimo_mtp.py`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.checkpoints import make_checkpoint, write_tensors
from tests.models.step_mtp import before_norm

LIKE = "qwen2"
_MTP = "model.mtp_layers.0."


def make_mimo(directory: str | Path, seed: int, tokenizer: bool = True, **overrides: Any) -> Path:
    """The checkpoint, in a folder with that of Qwen2 beside it (`like`); overrides: of `make_checkpoint`."""
    path, count = Path(directory), overrides.pop("num_mtp_layers", 1)
    own = {"tie_word_embeddings": False} | overrides
    return as_mimo(make_checkpoint(LIKE, like(path), seed, tokenizer=tokenizer, **own), path, seed, count)


def like(path: Path) -> Path:
    """The folder of the Qwen2 checkpoint of a MiMo checkpoint."""
    return path.with_name(f"{path.name}-like")


def as_mimo(source: Path, path: Path, seed: int, count: int = 1) -> Path:
    """A copy of a Qwen2 checkpoint of one file, with an MTP layer like the model's last one."""
    shutil.copytree(source, path)
    tensors, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(seed + 1)
    last = f"model.layers.{max(int(name.split('.')[2]) for name in tensors if '.layers.' in name)}."
    hidden = tensors["model.norm.weight"].shape[0]
    shapes = {name.replace(last, _MTP): t.shape for name, t in tensors.items() if name.startswith(last)}
    shapes |= {f"{_MTP}{part}_layernorm.weight": torch.Size([hidden]) for part in ("token", "hidden", "final")}
    shapes[f"{_MTP}input_proj.weight"] = torch.Size([hidden, 2 * hidden])
    for name, shape in shapes.items() if count else ():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * noise if "norm" in name else 0.15 * noise
    write_tensors(path, tensors)
    fields = json.loads((path / "config.json").read_text())
    fields |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": count}
    (path / "config.json").write_text(json.dumps(fields | {"attention_bias": True}, indent=1))
    return path


class MimoOracle:
    """Of the Qwen2 checkpoint beside a MiMo checkpoint, and of the MTP layer."""

    def __init__(self, path: Path) -> None:
        import transformers

        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(like(path), dtype=torch.float32, attn_implementation="eager").eval()
        tensors = load_file(path / "model.safetensors")
        self._parts = {name.removeprefix(_MTP): t for name, t in tensors.items() if name.startswith(_MTP)}
        config = type(self.model.config)(**self.model.config.to_dict() | {"num_hidden_layers": 1, "layer_types": None})
        config._attn_implementation = "eager"
        self._layer = transformers.Qwen2Model(config).eval()
        begins = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
        state = {f"layers.0.{name}": tensor for name, tensor in self._parts.items() if name.startswith(begins)}
        state["norm.weight"] = self._parts["final_layernorm.weight"]
        state["embed_tokens.weight"] = self.model.model.embed_tokens.weight
        self._layer.load_state_dict(state)
        self._eps = config.rms_norm_eps

    @torch.no_grad()
    def states(self, tokens: list[int]) -> Tensor:
        """The residual [T, D] after the model's last layer."""
        return before_norm(self.model.model, input_ids=torch.tensor([tokens]))[0]

    @torch.no_grad()
    def layer(self, next_ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of a text from its start: the MTP layer's residual [T, D], and its logits [T, V]."""
        embedded = self.model.model.embed_tokens(torch.tensor(next_ids))
        both = torch.cat((self._norm("hidden", hidden), self._norm("token", embedded)), -1)
        v, read = before_norm(self._layer, inputs_embeds=(both @ self._parts["input_proj.weight"].T)[None])
        return v, self.model.lm_head(read)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self._parts[f"{name}_layernorm.weight"]
