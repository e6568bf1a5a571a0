"""MTP layers of Nemotron-3: random tensors under the published names, and an oracle: transformers' model of attention
and experts, with vLLM's formula of its input (`nemotron_h_mtp.py`; transformers has no MTP for this model)."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def add_nemotron_mtp(tensors: dict[str, Tensor], kinds: str, index: int, generator: torch.Generator) -> None:
    """Like a layer of attention and one of experts of the model, whose layers are `kinds`."""
    base = "backbone." if any(name.startswith("backbone.") for name in tensors) else "model."
    like = next(tensor for name, tensor in tensors.items() if name.endswith("embeddings.weight"))
    hidden = like.shape[1]
    noise = partial(torch.randn, generator=generator)

    for half, kind in enumerate("*E"):
        source, target = f"{base}layers.{kinds.index(kind)}.", f"mtp.layers.{2 * index + half}."
        for name in [name for name in tensors if name.startswith(source)]:
            tensor = tensors[name]
            changed = (tensor.float() + 0.1 * noise(*tensor.shape)).to(tensor.dtype)
            tensors[target + name.removeprefix(source)] = changed
    first, second = (f"mtp.layers.{2 * index + half}." for half in (0, 1))
    tensors[f"{first}eh_proj.weight"] = (0.15 * noise(hidden, 2 * hidden)).to(like.dtype)
    for name in (f"{first}enorm", f"{first}hnorm", f"{second}final_layernorm"):
        tensors[f"{name}.weight"] = (1 + 0.2 * noise(hidden)).to(like.dtype)


class NemotronOracle:
    """transformers' model, and the first MTP layer of its checkpoint."""

    def __init__(self, path: Path) -> None:
        import transformers
        from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHModel

        tensors = load_file(path / "model.safetensors")
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = transformers.NemotronHForCausalLM.from_pretrained(path, **options).eval()
        config = copy.deepcopy(self.model.config)
        config.layer_types = config.layers_block_type = ["full_attention", "moe"]
        config.num_hidden_layers, self._eps = 2, config.layer_norm_epsilon
        self._layer = NemotronHModel(config).eval()
        mtp = {name.removeprefix("mtp."): t.float() for name, t in tensors.items() if name.startswith("mtp.")}
        self._own = {name.removeprefix("layers.0."): tensor for name, tensor in mtp.items() if "layers.0." in name}
        state = self._layer.state_dict()
        for name in state:
            if ".experts." not in name and name in mtp:
                state[name] = mtp[name]
        experts = range(config.n_routed_experts)
        for part in ("up_proj", "down_proj"):
            each = [mtp[f"layers.1.mixer.experts.{i}.{part}.weight"] for i in experts]
            state[f"layers.1.mixer.experts.{part}"] = torch.stack(each)
        state["norm_f.weight"] = mtp["layers.1.final_layernorm.weight"]
        self._layer.load_state_dict(state)

    @torch.no_grad()
    def states(self, tokens: list[int]) -> Tensor:
        """The model's states [T, D] after its final norm."""
        found: Tensor = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return found

    @torch.no_grad()
    def layer(self, next_ids: list[int], hidden: Tensor) -> Tensor:
        """v [T, D] of a text from its start."""
        embedded = self.model.get_input_embeddings()(torch.tensor(next_ids))
        both = torch.cat((self._norm("enorm", embedded), self._norm("hnorm", hidden)), -1)
        z = both @ self._own["eh_proj.weight"].T
        found: Tensor = self._layer(inputs_embeds=z[None], use_cache=False).last_hidden_state[0]
        return found

    @torch.no_grad()
    def logits(self, v: Tensor) -> Tensor:
        found: Tensor = self.model.lm_head(v)
        return found

    def chain(self, states: Tensor, text: list[int], depth: int) -> list[int]:
        """Drafts after a text, from the states of all its tokens but the last."""
        hidden, ids, drafts = states, text[1:], list[int]()
        for _ in range(depth):
            v = self.layer(ids, hidden)[-1:]
            drafts.append(int(self.logits(v).argmax()))
            hidden, ids = torch.cat((hidden, v)), [*ids, drafts[-1]]
        return drafts

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self._own[f"{name}.weight"]
