"""The acceptance benchmark's own model and MTP layers, against `MTPOracle` of DeepSeek V4."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from benchmarks.mtp_agreement import BatchModel
from tests.models.v4_checkpoints import make_v4
from tests.models.v4_mtp import MTPOracle


def test_drafts_of_deepseek_v4(tmp_path: Path) -> None:
    """Of two sequences, whose windows end within the prompt and whose entries are selected after it."""
    path = make_v4(tmp_path / "own", random.randrange(1 << 30), num_mtp_layers=1, tokenizer=False)
    oracle, ours = MTPOracle(path, tmp_path / "alone"), BatchModel(path, 2, 40)
    prompts = torch.randint(250, (2, 30))
    next_ids, state = ours.advance(prompts)
    for _ in range(3):
        drafts = ours.draft(state, 2)
        prompts = torch.cat((prompts, next_ids), dim=1)
        for tokens, chain in zip(prompts.tolist(), drafts.tolist()):
            assert chain == oracle.chain(oracle.streams(tokens[:-1]), tokens, 2)
        next_ids, state = ours.advance(next_ids)
