"""The DSpark layers of a DeepSeek V4 checkpoint by transformers' decoder layers and the formulas of DeepSeek's release
(`inference/model.py`): transformers has no such layers.

Legend: T tokens, B tokens of a block, D hidden, n streams, K tapped layers, R rank of the Markov head.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.checkpoints import write_tensors
from tests.models.v4_checkpoints import FIELDS, SLIDING, STD, load_v4, make_v4, random_tensors
from tests.models.v4_mtp import OUTSIDE

STAGES, RANK = 3, 8
DSPARK: dict[str, Any] = {
    "dspark_block_size": 4, "dspark_noise_token_id": 9,
    "dspark_markov_rank": RANK,
}  # fmt: skip
"""Fields of config.json."""
_ALONE: dict[str, Any] = {"num_hidden_layers": STAGES, "layer_types": [SLIDING] * STAGES, "num_hash_layers": 0}
"""Fields of a model of the DSpark layers alone."""
_HEADS = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight")


def make_dspark(
    path: Path, seed: int, agreeing: bool = False, dtype: torch.dtype = torch.float32,
    taps: tuple[int, ...] = (1, 3, 4), **fields: Any,
) -> Path:  # fmt: skip
    """A checkpoint with DSpark layers under the published names.

    Args:
        agreeing: drafts are sometimes accepted: the Markov head knows the model's most likely next tokens.
    """
    make_v4(path, seed, dtype, **fields)
    raw = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    own = {key: value for key, value in (raw | _ALONE).items() if key != "compress_ratios"}
    for name, tensor in random_tensors(own, seed + 1).items():
        kind, _, rest = name.partition(".")
        if kind == "layers":
            tensors[f"mtp.{rest}"] = tensor.to(dtype)
        elif name in OUTSIDE:
            tensors[f"mtp.{STAGES - 1}.{name}"] = tensor
    draw = torch.Generator().manual_seed(seed)
    size, vocab = raw["hidden_size"], raw["vocab_size"]
    tensors["mtp.0.main_proj.weight"] = STD * torch.randn((size, len(taps) * size), generator=draw)
    tensors["mtp.0.main_norm.weight"] = 1 + 0.2 * torch.randn(size, generator=draw)
    shapes = ((vocab, RANK), (vocab, RANK), (1, size + RANK))
    for name, shape in zip(_HEADS, shapes):
        tensors[f"mtp.{STAGES - 1}.{name}"] = torch.randn(shape, generator=draw)
    write_tensors(path, tensors)
    own = DSPARK | {"dspark_target_layer_ids": list(taps), "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(raw | own))
    if agreeing:
        _agree(path, tensors)
    return path


def _agree(path: Path, tensors: dict[str, Tensor]) -> None:
    """The next token of the model becomes a function of the last one, which the Markov head has learned."""
    draw = torch.Generator().manual_seed(1)
    vocab, size = tensors["embed.weight"].shape
    tensors["embed.weight"].normal_(generator=draw)
    tensors["head.weight"].normal_(std=3 * size**-0.5, generator=draw)
    for name in tensors:
        if name.endswith(("wo_b.weight", "w2.weight")):
            tensors[name] *= 0.1
    write_tensors(path, tensors)
    with torch.no_grad():
        best = load_v4(path)(torch.arange(vocab)[:, None]).logits[:, -1].argmax(-1)
    code = torch.randn((vocab, RANK), generator=draw)
    tensors[f"mtp.{STAGES - 1}.{_HEADS[0]}"] = torch.nn.functional.normalize(code)[best].clone()
    tensors[f"mtp.{STAGES - 1}.{_HEADS[1]}"] = 40 * torch.nn.functional.normalize(code)
    write_tensors(path, tensors)


class DSparkOracle:
    """transformers' model, and a model with the DSpark layers as its layers, over a checkpoint of `make_dspark`.

    Args:
        folder: for the files of the second model.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        raw = json.loads((path / "config.json").read_text())
        own = {name.removeprefix("mtp."): tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
        last = f"{STAGES - 1}."
        self._proj, self._norm = own.pop("0.main_proj.weight"), own.pop("0.main_norm.weight")
        self._w1, self._w2, _ = (own.pop(last + name) for name in _HEADS)
        outside = {name: own.pop(last + name) for name in OUTSIDE}
        fields = {name: raw[name] for name in FIELDS if name in raw} | _ALONE
        make_v4(folder, tokenizer=False, **fields)
        both = {name: tensors[name].clone() for name in ("embed.weight", "head.weight")}
        write_tensors(folder, {f"layers.{name}": tensor for name, tensor in own.items()} | outside | both)
        self.model, self._drafts = load_v4(path), load_v4(folder)
        self._taps, self._mask = raw["dspark_target_layer_ids"], raw["dspark_noise_token_id"]
        self._window, self._eps = raw["sliding_window"], raw["rms_norm_eps"]

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """Logits [T, V] of the model."""
        return self.model(torch.tensor([ids])).logits[0]

    @torch.no_grad()
    def states(self, ids: list[int]) -> Tensor:
        """[T, K D]: means of the streams after the tapped layers."""
        seen: list[Tensor] = []

        def tap(*call: Any) -> None:
            seen.append(_first(call[-1])[0].mean(1))

        hooks = [self.model.model.layers[i].register_forward_hook(tap) for i in self._taps]
        self.model(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        return torch.cat(seen, -1)

    @torch.no_grad()
    def block_logits(self, states: Tensor, root: int, count: int) -> Tensor:
        """Logits [count, V] of a block after the tokens of states [T, K D], without the Markov head's bias."""
        main = states @ self._proj.T
        main = main * torch.rsqrt(main.square().mean(-1, keepdim=True) + self._eps) * self._norm
        length, total = len(main), len(main) + count
        visible = torch.zeros(total, total, dtype=torch.bool)
        visible[:, 0] = True  # rows of context have no meaning
        visible[length:] = False
        visible[length:, max(0, length - self._window) :] = True
        mask = torch.zeros(total, total).masked_fill_(~visible, torch.finfo(torch.float32).min)[None, None]
        hooks = []
        for layer in self._drafts.model.layers:
            attention = layer.self_attn

            def keys(module: Any, args: Any, out: Tensor) -> Tensor:
                return torch.cat((module.weight @ main.T, out[0, length:].T), 1).T[None]

            def masked(module: Any, args: Any, more: dict[str, Any]) -> Any:
                return args, more | {"attention_mask": mask}

            hooks.append(attention.kv_proj.register_forward_hook(keys))
            hooks.append(attention.register_forward_pre_hook(masked, with_kwargs=True))
        ids = [0] * length + [root] + [self._mask] * (count - 1)
        logits = self._drafts(torch.tensor([ids])).logits[0, length:]
        for hook in hooks:
            hook.remove()
        return logits

    def chain(self, states: Tensor, text: list[int], depth: int) -> list[int]:
        """Greedy drafts after `text`. states: of all its tokens but the last."""
        before, drafts = text[-1], list[int]()
        for logits in self.block_logits(states, before, depth):
            before = int((logits + self._w2 @ self._w1[before]).argmax())
            drafts.append(before)
        return drafts


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out
