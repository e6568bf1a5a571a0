"""The MTP layer of a DeepSeek V4 checkpoint by transformers' decoder layer and the formula of DeepSeek's release
(`inference/model.py`): transformers has no such layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.checkpoints import write_tensors
from tests.models.v4_checkpoints import FIELDS, SLIDING, load_v4, make_v4

BRANCH_GAIN, PASSED_ON, NOISE = 0.2, 3.0, 0.3
OUTSIDE = ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale")


class MTPOracle:
    """transformers' model, and a model of one layer with the weights of MTP layer 0, over a checkpoint of `make_v4`.

    Args:
        folder: for the files of the model of one layer.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        mtp = {name.removeprefix("mtp.0."): tensor for name, tensor in tensors.items() if name.startswith("mtp.0.")}
        self._inputs = {name: mtp.pop(f"{name}.weight") for name in ("e_proj", "h_proj", "enorm", "hnorm")}
        layer = {name if name in OUTSIDE else f"layers.0.{name}": tensor for name, tensor in mtp.items()}
        one = {"num_hidden_layers": 1, "layer_types": [SLIDING], "num_hash_layers": 0}
        make_v4(folder, tokenizer=False, **one)
        write_tensors(folder, layer | {name: tensors[name].clone() for name in ("embed.weight", "head.weight")})
        self._model, self._mtp = load_v4(path), load_v4(folder)

    def streams(self, ids: list[int]) -> Tensor:
        """The main model's streams [T, n D] after its last layer."""
        return _run(self._model, ids)[0]

    @torch.no_grad()
    def draft(self, next_ids: list[int], streams: Tensor) -> tuple[Tensor, Tensor]:
        """v [T, n D] of a sequence from its start, and its logits [T, V]. streams: [T, n D]."""
        weights, width = self._inputs, FIELDS["hidden_size"]
        embedding = self._model.model.embed_tokens(torch.tensor(next_ids))
        z = (_norm(embedding) * weights["enorm"]) @ weights["e_proj"].T
        hidden = (_norm(streams.view(-1, FIELDS["hc_mult"], width)) * weights["hnorm"]) @ weights["h_proj"].T
        return _run(self._mtp, next_ids, z.unsqueeze(1) + hidden)

    def chain(self, streams: Tensor, text: list[int], depth: int) -> list[int]:
        """Greedy drafts after `text`. streams: of all its tokens but the last."""
        next_ids, drafts = text[1:], list[int]()
        for _ in range(depth):
            v, logits = self.draft(next_ids, streams)
            drafts.append(int(logits[-1].argmax()))
            next_ids, streams = [*next_ids, drafts[-1]], torch.cat((streams, v[-1:]))
        return drafts


def make_agreeing(path: Path, seed: int, **fields: Any) -> Path:
    """A checkpoint with an MTP layer whose drafts are sometimes accepted, see `tests.speculation.agreeing`."""
    make_v4(path, seed, num_mtp_layers=1, **fields)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name == "embed.weight":
            tensor.normal_(generator=generator)
        elif name == "head.weight":
            tensor.normal_(std=3 * tensor.shape[1] ** -0.5, generator=generator)
        elif name.endswith(("wo_b.weight", "w2.weight")):
            tensor.mul_(BRANCH_GAIN)
        elif name.endswith("h_proj.weight"):
            tensor.mul_(NOISE)
        elif name.endswith("e_proj.weight"):
            tensor.mul_(NOISE).diagonal().add_(PASSED_ON)
    write_tensors(path, tensors)
    return path


@torch.no_grad()
def _run(model: Any, ids: list[int], streams: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The streams after the last layer, and logits. streams: input of the first layer; None: the model's own."""
    seen: list[Tensor] = []
    hooks = [model.model.hc_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))]
    if streams is not None:
        change = model.model.layers[0].register_forward_pre_hook(lambda _, args: (streams.unsqueeze(0), *args[1:]))
        hooks.append(change)
    logits = model(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    return seen[0][0].flatten(1), logits


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + FIELDS["rms_norm_eps"])
