"""A model from outside the engine: some layers have a linear recurrence in place of attention, with a state for
each request. Its reference is transformers' model in float64 with the same layers, which recomputes every token.

Legend: T tokens, D hidden (also channels of the recurrence), n tokens of a sequence.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.quantization.protocol import ActivationFormat
from moe_engine.models import registry
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_parsers.families import parse_auto
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.state import StateGroup, StatePart
from moe_engine.models.families.deepseek import DeepseekModel
from moe_engine.models.families.dense import DenseModel
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.share import Share
from tests.models.checkpoints import make_checkpoint, write_tensors

INPUTS = ("u", "gate", "decay")
TAPS = 3
"""Width of the convolution before the recurrence in tokens."""
LAYERS = (1, 3)
SUM, TAIL = 0, 1
"""Parts of the state: the recurrence, and the last inputs of the convolution."""


def parse(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    config = parse_auto(fields, generation)
    width = config.hidden_size
    parts = (StatePart((width,), "float32", sharded=0), StatePart((TAPS - 1, width), sharded=1))
    return dataclasses.replace(config, state_groups=(StateGroup(tuple(fields.raw["ema_layers"]), parts),))


def register() -> None:
    """Also the target of an entry point."""
    for name in ("EmaDense", "EmaMLA"):
        registry.register(f"{name}ForCausalLM", f"tests.models.ema:{name}", "tests.models.ema:parse")


class Recurrence:
    """hidden [T, D] -> [T, D], the partial sum of the channels of this rank."""

    def __init__(self, model: Decoder, layer: int, reader: WeightSource) -> None:
        self._layer, width = layer, model.config.hidden_size
        prefix, share = f"model.layers.{layer}.self_attn", Share.of(model.parallel.attn_tp)
        linear, names = model.backends.linear, [f"{prefix}.{name}_proj" for name in INPUTS]
        self._in = load_linear(linear, reader, names, [width] * 3, width, out_shares=[share] * 3)
        self._out = load_linear(linear, reader, [f"{prefix}.out_proj"], [width], width, in_share=share)
        self._conv = reader.tensor(f"{prefix}.conv", (width, TAPS), Cut(share.cut(width)))

    @property
    def input_format(self) -> ActivationFormat:
        return self._in.input_format

    def forward(self, hidden: Tensor, batch: ForwardBatch, *_: Any) -> Tensor:
        inputs, gate, decay = self._in(hidden).chunk(3, -1)
        sums, tails = batch.state(self._layer, SUM), batch.state(self._layer, TAIL)
        pieces, begin = [], 0
        for place, count in enumerate(batch.sequence_lens):
            own = slice(begin, begin := begin + count)
            piece, sums[place], tails[place] = recur(inputs[own], decay[own], self._conv, sums[place], tails[place])
            pieces.append(piece)
        batch.set_state(self._layer, sums, SUM)
        batch.set_state(self._layer, tails, TAIL)
        return self._out(torch.cat(pieces).to(gate.dtype) * functional.silu(gate))


def recur(inputs: Tensor, decay: Tensor, conv: Tensor, total: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """inputs, decay [n, D]; conv [D, TAPS]; total [D], tail [TAPS-1, D] -> totals [n, D], the last one, a new tail."""
    text = torch.cat((tail, inputs))
    taken = (text.unfold(0, TAPS, 1) * conv).sum(-1)  # [n, D]
    totals = []
    for value, keep in zip(taken, decay.sigmoid()):
        total = keep * total + (1 - keep) * value
        totals.append(total)
    return torch.stack(totals), total, text[1 - TAPS :]


class WithRecurrences(Decoder):
    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        if layer_index in self.config.state_layers:
            return Recurrence(self, layer_index, reader)
        return super().make_attention(layer_index, reader, rotary)


class EmaDense(WithRecurrences, DenseModel):
    """The layers of Llama, Qwen and Mistral."""


class EmaMLA(WithRecurrences, DeepseekModel):
    """DeepSeek's layers."""


class _Reference(torch.nn.Module):
    """`Recurrence` over whole texts, as the attention of a transformers layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in (*INPUTS, "out"):
            self.add_module(f"{name}_proj", torch.nn.Linear(width, width, bias=False))
        self.conv = torch.nn.Parameter(torch.empty(width, TAPS))

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.stack([self._of_text(text) for text in hidden_states]), None

    def _of_text(self, states: Tensor) -> Tensor:
        inputs, gate, decay = (getattr(self, f"{name}_proj")(states) for name in INPUTS)
        nothing = states.new_zeros(TAPS, inputs.shape[1])
        totals, _total, _tail = recur(inputs, decay, self.conv, nothing[0], nothing[1:])
        return self.out_proj(totals * functional.silu(gate))


def make_ema_checkpoint(kind: str, directory: Path, seed: int) -> Path:
    """A checkpoint of `checkpoints.KINDS` with recurrences in `LAYERS`."""
    path = make_checkpoint(kind, directory, seed=seed, num_hidden_layers=1 + max(LAYERS))
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for layer in LAYERS:
        prefix = f"model.layers.{layer}.self_attn."
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
        width = tensors["model.norm.weight"].numel()
        for name in (*INPUTS, "out"):
            tensors[f"{prefix}{name}_proj.weight"] = 0.2 * torch.randn(width, width, generator=generator)
        tensors[f"{prefix}conv"] = torch.randn(width, TAPS, generator=generator)
    write_tensors(path, tensors)
    file = path / "config.json"
    config = json.loads(file.read_text())
    name = "EmaMLA" if "kv_lora_rank" in config else "EmaDense"
    file.write_text(json.dumps({**config, "architectures": [f"{name}ForCausalLM"], "ema_layers": list(LAYERS)}))
    return path


def reference(path: Path) -> torch.nn.Module:
    """transformers' model of the checkpoint in float64."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    tensors = load_file(path / "model.safetensors")
    for layer in LAYERS:
        prefix = f"model.layers.{layer}.self_attn."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        model.model.layers[layer].self_attn = _Reference(model.config.hidden_size)
        model.model.layers[layer].self_attn.load_state_dict(own)
    return model.double().eval()
