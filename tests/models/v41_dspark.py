"""The DSpark layers of a DeepSeek V4.1 checkpoint: random ones, and their formulas in float64.

No released transformers has them. The formulas are those of `models.families.deepseek_v41`, of the report, and of
V4's layers.

Legend: T tokens, B tokens of a block, D hidden, n streams, K tapped layers, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize

from tests.models.checkpoints import write_tensors
from tests.models.deepseek_v41 import V41Reference, make_v41
from tests.models.v41_tower import IMAGE

STAGES = 3
DSPARK: dict[str, Any] = {
    "num_nextn_predict_layers": STAGES, "dspark_block_size": 4, "dspark_noise_token_id": 9, "dspark_markov_rank": 8,
    "dspark_target_layer_ids": [3, 6, 8], "dspark_n_routed_experts": 6, "dspark_num_experts_per_tok": 3,
}  # fmt: skip
"""Fields of config.json. Layer 3 has a table of n-grams, whose rows are in the streams that are read."""


def make_v41_dspark(path: Path, seed: int, agreeing: bool = False, **fields: Any) -> Path:
    """A checkpoint with DSpark layers.

    Args:
        agreeing: drafts are sometimes accepted: the Markov head knows the model's most likely next tokens.
    """
    make_v41(path, seed, **DSPARK | fields)
    if agreeing:
        _agree(path)
    return path


def _agree(path: Path) -> None:
    """The next token of the model becomes mostly a function of the last one, which the Markov head has learned."""
    tensors, draw = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1)
    vocab, size = tensors["embed.weight"].shape
    tensors["embed.weight"].normal_(generator=draw)
    tensors["head.weight"].normal_(std=3 * size**-0.5, generator=draw)
    tensors["head.weight"][IMAGE] = 0.0  # no answer has the placeholder
    for name in tensors:
        if name.endswith(("wo_b.weight", "w2.weight", "engram.wkv.weight")):
            tensors[name] *= 0.1
    best = (normalize(tensors["embed.weight"]) * tensors["norm.weight"]) @ tensors["head.weight"].T
    code = normalize(torch.randn((vocab, DSPARK["dspark_markov_rank"]), generator=draw))
    head = f"mtp.{STAGES - 1}.markov_head"
    tensors[f"{head}.embed.weight"] = code[best.argmax(-1)].clone()
    tensors[f"{head}.head.weight"] = 40 * code
    write_tensors(path, tensors)


class V41DSparkReference(V41Reference):
    """The model, and blocks of drafts."""

    def block_logits(self, states: Tensor, root: int, count: int) -> Tensor:
        """Logits [B, V] of a block of `count` tokens after the tokens of states [T, K D], without the Markov head's
        bias."""
        main = self._norm("mtp.0.main_norm", states @ self._t["mtp.0.main_proj.weight"].T)
        streams, before = self._start([root] + [self.fields["dspark_noise_token_id"]] * (count - 1))
        for stage in range(STAGES):
            name = f"mtp.{stage}"
            streams, before = self._layer(streams, before, name, partial(self._block_attention, name=name, main=main))
        return self._head(f"mtp.{STAGES - 1}.norm", streams, before)

    def chain(self, states: Tensor, text: list[int], depth: int) -> list[int]:
        """Greedy drafts after `text`. states: of all its tokens but the last."""
        before, drafts, head = text[-1], list[int](), f"mtp.{STAGES - 1}.markov_head"
        for logits in self.block_logits(states, before, depth):
            bias = self._t[f"{head}.head.weight"] @ self._t[f"{head}.embed.weight"][before]
            before = int((logits + bias).argmax())
            drafts.append(before)
        return drafts

    def _block_attention(self, x: Tensor, name: str, main: Tensor) -> Tensor:
        """Every token of the block sees the window before the block, and the whole block."""
        length, attention = len(main), f"{name}.attn"
        at, first = torch.arange(length, length + len(x)), max(0, length - self.fields["sliding_window"])
        keys = [
            self._keys(main[first:], attention, torch.arange(first, length), 0), self._keys(x, attention, at, 0)
        ]  # fmt: skip
        _, q = self._query(x, attention, at, 0)
        seen = torch.ones(len(x), length - first + len(x), dtype=torch.bool)
        return self._attend(q, torch.cat(keys), seen, attention, at, 0)
