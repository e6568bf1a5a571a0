"""MTP layers of Step 3.5 and 3.7: random tensors under the published names, and an oracle.

The oracle is transformers' text model of one layer with a window and an MLP, and vLLM's formula of its input,
its states and head (`step3p5_mtp.py`). transformers' own MTP class reads states after the final norm and shares the
model's head instead.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

_WINDOW = "sliding_attention"
_LISTS = {"layer_types": _WINDOW, "rope_theta": 1e4, "partial_rotary_factors": 1.0}
_LISTS |= {"swiglu_limits": 0.0, "swiglu_limits_shared": 0.0}


def with_mtp_fields(fields: dict[str, Any], count: int) -> dict[str, Any]:
    """config.json's lists by layer with entries of MTP layers, as published."""
    longer = {name: [*fields[name], *[value] * count] for name, value in _LISTS.items() if fields.get(name)}
    return fields | longer


def add_step_mtp(tensors: dict[str, Tensor], fields: dict[str, Any], index: int, generator: torch.Generator) -> None:
    """Attention as of a layer with a window, MLP as of a dense layer, and a head."""
    kinds, dense = fields["layer_types"], range(fields["num_hidden_layers"])
    sparse = {int(number) for number in fields["moe_layers_enum"].split(",")}
    like = kinds.index(_WINDOW), next(layer for layer in dense if layer not in sparse)
    target, hidden = f"model.layers.{fields['num_hidden_layers'] + index}.", fields["hidden_size"]
    for part, source in zip((("self_attn.", "input_"), ("mlp.", "post_")), like):
        begins = tuple(f"model.layers.{source}.{name}" for name in part)
        for name in [name for name in tensors if name.startswith(begins)]:
            noise = 0.1 * torch.randn(tensors[name].shape, generator=generator)
            tensors[target + name.split(".", 3)[3]] = (tensors[name].float() + noise).to(tensors[name].dtype)
    shapes = {"enorm": (hidden,), "hnorm": (hidden,), "transformer.shared_head.norm": (hidden,)}
    shapes |= {"eh_proj": (hidden, 2 * hidden)}
    shapes |= {"transformer.shared_head.output": (fields["vocab_size"], hidden)}
    kind = tensors["model.norm.weight"].dtype
    for name, shape in shapes.items():
        tensors[f"{target}{name}.weight"] = (0.2 * torch.randn(shape, generator=generator)).to(kind)


class StepOracle:
    """transformers' model, and the MTP layers of its checkpoint."""

    def __init__(self, path: Path) -> None:
        import transformers

        self.tensors = load_file(path / "model.safetensors")
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = transformers.Step3p7ForConditionalGeneration.from_pretrained(path, **options).eval()
        self.text = self.model.model.language_model
        self.first, self._eps = self.text.config.num_hidden_layers, self.text.config.rms_norm_eps
        self._layers = [self._layer(index) for index in range(self.text.config.num_nextn_predict_layers)]

    def _layer(self, index: int) -> Any:
        """transformers' text model of the MTP layer alone."""
        from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

        fields = copy.deepcopy(self.text.config.to_dict())
        heads = {0: {"num_attention_heads": fields["num_sliding_attention_heads"]}}
        fields |= {"num_hidden_layers": 1, "layer_types": [_WINDOW], "mlp_layer_types": ["dense"]}
        fields |= {"num_nextn_predict_layers": 0, "per_layer_config": heads}
        fields |= dict.fromkeys(("swiglu_limits", "swiglu_limits_shared", "mtp_layer_types", "mtp_mlp_layer_types"))
        config = type(self.text.config)(**fields)
        config._attn_implementation = "eager"
        own = Step3p7TextModel(config).eval()
        prefix = f"model.layers.{self.first + index}."
        parts = {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}
        inner = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
        state = {f"layers.0.{name}": tensor for name, tensor in parts.items() if name.startswith(inner)}
        state["norm.weight"] = parts["transformer.shared_head.norm.weight"]
        state["embed_tokens.weight"] = self.text.embed_tokens.weight
        own.load_state_dict({name: tensor.float() for name, tensor in state.items()})
        return own

    @torch.no_grad()
    def states(self, tokens: list[int]) -> Tensor:
        """The residual [T, D] after the model's last layer."""
        return before_norm(self.text, input_ids=torch.tensor([tokens]))[0]

    @torch.no_grad()
    def layer(self, index: int, next_ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of a text from its start: the layer's residual [T, D], and its logits [T, V]."""
        embedded = self.text.embed_tokens(torch.tensor(next_ids))
        both = torch.cat((self._norm(index, "enorm", embedded), self._norm(index, "hnorm", hidden)), -1)
        z = both @ self._weight(index, "eh_proj").T
        v, read = before_norm(self._layers[index], inputs_embeds=z[None])
        return v, read @ self._weight(index, "transformer.shared_head.output").T

    def chain(self, states: Tensor, text: list[int], depth: int) -> list[int]:
        """Drafts after a text, from the states of all its tokens but the last: a layer each, then the last one's."""
        hidden, ids, drafts = states, text[1:], list[int]()
        for step in range(depth):
            index = min(step, len(self._layers) - 1)
            v, logits = self.layer(index, ids, hidden)
            drafts.append(int(logits[-1].argmax()))
            if step < len(self._layers) - 1:
                hidden, ids = v, [*ids[1:], drafts[-1]]
            else:
                hidden, ids = torch.cat((hidden, v[-1:])), [*ids, drafts[-1]]
        return drafts

    def _norm(self, index: int, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * (1 + self._weight(index, name))

    def _weight(self, index: int, name: str) -> Tensor:
        return self.tensors[f"model.layers.{self.first + index}.{name}.weight"].float()


def before_norm(model: Any, **given: Any) -> tuple[Tensor, Tensor]:
    """The input and the result [T, D] of the last norm of a text model."""
    found: list[Tensor] = []
    handle = model.norm.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    try:
        read = model(use_cache=False, **given).last_hidden_state
    finally:
        handle.remove()
    return found[0][0], read[0]
