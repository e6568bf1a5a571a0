"""A checkpoint whose MTP drafts agree with the model at a chosen rate: ``python -m benchmarks.agreeing_checkpoint``.

Drafts of random weights never match a random model, and trained weights agree at an arbitrary rate. To measure at a
chosen acceptance rate, this program writes the V3-shaped checkpoint of `checkpoints` with one MTP layer and four
changes. All weights stay dense and random in size, so bytes and arithmetic equal those of any checkpoint of the shape.

1. The contributions of attention and feed-forward to the residual stream are small: the last hidden state is nearly the
   embedding of the last token. All embeddings have the same norm.
2. The ordinary tokens form one random cycle. The head's row of a token is the embedding of its predecessor in the
   cycle, with the second half doubled; so greedy decoding follows the cycle and never reaches a special token.
3. For some tokens (spoiled), the first halves of these rows are permuted among themselves. The model is dominated by
   the doubled second half and answers as before.
4. The MTP layer's eh_proj passes on the embedding of the next token, with its second half scaled to a quarter: correct
for all unspoiled tokens; for spoiled tokens the row with the permuted half wins and the correct token is second.
The correctness of a draft thus depends only on the preceding token: the rate holds at every position of a chain. The
rate is the share of unspoiled tokens; `mtp_agreement` measures it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.checkpoints import (
    LOGIT_SPREAD,
    SHAPES,
    SPECIAL_TOKENS,
    ensure_checkpoint,
    parse_overrides,
    random_shards,
    write_once,
)

AGREEMENT_FIELD = "mtp_agreement"
"""The field of config.json with the rate; ignored by loaders."""
_BRANCH_GAIN = 1 / 64
_SECOND_HALF_GAIN = 2.0
_PASSED_SECOND_HALF = 0.25
_PROJECTION_NOISE = 0.1
_SPECIAL_GAIN = 0.25


def ensure_agreeing_checkpoint(
    agreement: float = 0.8,
    shape: str = "moe-390m",
    directory: str | Path | None = None,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """The directory of the checkpoint, written if missing.

    Args:
        agreement: share of correct drafts, at each position of a chain; 0 to 1.
        shape, directory, seed, overrides: as in `checkpoints.ensure_checkpoint`; a shape with MTP layers.

    Raises:
        ValueError: an agreement out of range, a dense shape, or `directory` holds another checkpoint.
    """
    if not 0 <= agreement <= 1:
        raise ValueError(f"agreement {agreement}: choose 0 to 1")
    if "kv_lora_rank" not in SHAPES[shape]:
        raise ValueError(f"{shape} has no MTP layers; choose one of the moe shapes")
    config = SHAPES[shape] | {"num_nextn_predict_layers": 1} | overrides | {AGREEMENT_FIELD: agreement}
    return write_once(f"{shape}-agreeing-{agreement:g}", config, directory, seed, agreeing_shards)


def agreeing_shards(config: dict[str, Any], seed: int) -> Iterator[dict[str, Tensor]]:
    """`checkpoints.random_shards` with the four changes."""
    generator = torch.Generator().manual_seed(seed)
    embedding = head = torch.empty(0)
    for tensors in random_shards(config, seed):
        for name, tensor in tensors.items():
            if name.endswith((".o_proj.weight", ".down_proj.weight")):
                tensor.mul_(_BRANCH_GAIN)
            elif name.endswith(".eh_proj.weight"):
                pass_embedding(tensor)
            elif name == "model.embed_tokens.weight":
                embedding = level_halves(tensor)
            elif name == "lm_head.weight":
                head = tensor
                fill_head(head, embedding, config[AGREEMENT_FIELD], generator)
        yield tensors


def level_halves(embedding: Tensor) -> Tensor:
    """embedding [V, D], in place: both halves of every row get a mean square of 1, so that all norms are equal."""
    halves = embedding.view(len(embedding), 2, -1)
    halves /= halves.float().square().mean(dim=2, keepdim=True).sqrt()
    return embedding


def fill_head(head: Tensor, embedding: Tensor, agreement: float, generator: torch.Generator) -> None:
    """head, embedding [V, D]: rows of ordinary tokens as above; special tokens keep their rows, whose logits are too
    small to win."""
    special = len(SPECIAL_TOKENS)
    cycle = special + torch.randperm(head.shape[0] - special, generator=generator)
    half, gain = head.shape[1] // 2, LOGIT_SPREAD * head.shape[1] ** -0.5
    spoiled = cycle[torch.randperm(len(cycle), generator=generator)][round(agreement * len(cycle)) :]
    decoy = torch.arange(head.shape[0])
    decoy[spoiled] = spoiled.roll(1)
    following = cycle.roll(-1)
    head[following, :half] = gain * embedding[decoy[cycle], :half]
    head[following, half:] = gain * _SECOND_HALF_GAIN * embedding[cycle, half:]
    head[:special] *= _SPECIAL_GAIN


def pass_embedding(eh_proj: Tensor) -> None:
    """eh_proj [D, 2D], random: mostly noise, plus the diagonal that passes on the embedding."""
    size = eh_proj.shape[0]
    passed = torch.ones(size)
    passed[size // 2 :] = _PASSED_SECOND_HALF
    eh_proj.mul_(_PROJECTION_NOISE)
    eh_proj[:, :size].diagonal().add_(passed)


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("agreeing_checkpoint", __doc__)
    parser.add_argument("shape", nargs="?", default="moe-390m", choices=sorted(s for s in SHAPES if "moe" in s))
    parser.add_argument("--agreement", type=float, default=0.8, help="share of correct drafts (default: 0.8)")
    parser.add_argument("--random", action="store_true", help="ordinary random weights instead: no draft is correct")
    parser.add_argument("--directory", help="output folder (default: the cache)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="changes to config.json")
    args = parser.parse_args(argv)
    overrides = parse_overrides(args.set)
    if args.random:
        layers = {"num_nextn_predict_layers": 1} | overrides
        print(ensure_checkpoint(args.shape, args.directory, args.seed, **layers))
    else:
        print(ensure_agreeing_checkpoint(args.agreement, args.shape, args.directory, args.seed, **overrides))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
