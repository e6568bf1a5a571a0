"""Flags of speculative decoding: a drafter proposes tokens, and the model verifies them in one step.

`resolve_speculation` turns these flags into a `SpeculationConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.config.numbers import whole_number

AUTO = "auto"


def parse_steps(text: str) -> str:
    """``auto`` or a whole number that is not negative, as text. Raises ValueError."""
    if text.strip().lower() == AUTO:
        return AUTO
    number = whole_number(text)
    if number < 0:
        raise ValueError("must not be negative")
    return str(number)


@dataclass(frozen=True)
class SpeculativeArgs:
    speculative_algorithm: str | None = flag(
        None,
        "Speculative decoding: draft tokens and verify them in one step; the same answers in fewer steps. NEXTN: "
        "the checkpoint's multi-token-prediction (MTP) layers draft; EAGLE, EAGLE3, DFLASH, DSPARK: a head in "
        "--speculative-draft-model-path that was trained for the model (DSPARK also DSpark layers of the "
        "checkpoint; EAGLE without a path: NEXTN); STANDALONE: a small model with the same vocabulary; NGRAM: "
        "earlier text that followed the same tokens. Left out: off.",
        aliases=("--speculative-algo",),
        choices=("NEXTN", "EAGLE", "EAGLE3", "DFLASH", "DSPARK", "STANDALONE", "NGRAM"),
        unsupported={
            "UNO": "drafts by a LoRA adapter of the model itself",
            "FROZEN_KV_MTP": "drafters that read the KV of the model's layers (assistants of Gemma 4)",
        },
        parse=str.upper,
    )
    speculative_draft_model_path: str | None = flag(
        None,
        "Folder or hub id of the draft model. STANDALONE needs one: a small model with the same vocabulary. EAGLE, "
        "EAGLE3, DFLASH and DSPARK: the head that was trained for the model. NEXTN uses the MTP layers of the model's "
        "own checkpoint (leave it out), or an MTP layer exported on its own (SGLang's ...NextN checkpoints).",
        aliases=("--speculative-draft-model",),
        metavar="PATH",
    )
    speculative_num_steps: str | None = flag(
        None,
        "Draft steps, the depth of the draft tree. auto: the engine chooses 0 to 6 for each step (0 to "
        "--speculative-num-draft-tokens minus 1 where that is given). Left out, with topk and draft tokens: 3, 1, 4 "
        "(NGRAM: 4, 1, 5; DFLASH, DSPARK: the block of the head).",
        parse=parse_steps,
        metavar="N|auto",
    )
    speculative_eagle_topk: int | None = flag(
        None,
        "Branches kept at each depth of the draft tree. 1 drafts a chain; a tree pays off where drafts are often "
        "rejected and few requests run.",
        metavar="K",
    )
    speculative_num_draft_tokens: int | None = flag(
        None,
        "Tokens verified per request in one step, the last accepted token included; with topk 1 always the steps + 1. "
        "At most 64.",
        metavar="N",
    )
    speculative_token_map: str | None = flag(
        None,
        "EAGLE: file with the ids of frequent tokens (a list or tensor of torch.save, as FR-Spec's). Only these are "
        "drafts, so that the head multiplies fewer rows of the model's LM head. An EAGLE-3 head has its own tokens.",
        metavar="FILE",
    )
    speculative_accept_threshold_single: float = flag(
        1.0,
        "Accept a draft to which the model gives at least this probability. Below 1, answers may differ from those "
        "without speculation.",
        metavar="P",
    )
    speculative_accept_threshold_acc: float = flag(
        1.0,
        "Accept a draft of probability p with probability min(1, p / this). Below 1, answers may differ from those "
        "without speculation.",
        metavar="P",
    )
    speculative_simulated_accept_length: float | None = flag(
        None,
        "For benchmarks: accept drafts at random, this many tokens of a verify step on average (at least 1). "
        "Answers are not the model's; the log and every response have a mark.",
        metavar="TOKENS",
    )
    speculative_ngram_min_match_window_size: int = flag(
        1, "NGRAM: fewest last tokens that must match earlier text.", metavar="TOKENS"
    )
    speculative_ngram_max_match_window_size: int = flag(
        12, "NGRAM: most last tokens that are matched; the longest match is used.", metavar="TOKENS"
    )
