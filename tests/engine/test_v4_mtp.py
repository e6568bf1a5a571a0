"""Drafts of DeepSeek V4's MTP layer in whole engines: tokens of transformers, the acceptance of an offline count."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine import Engine
from moe_engine.frontend.weights.weight_updates import WeightUpdates
from tests.models.v4_checkpoints import load_v4, make_v4
from tests.models.v4_mtp import MTPOracle, make_agreeing
from tests.speculation.eagle_heads import chain_counts

pytestmark = pytest.mark.usefixtures("forked_processes")

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 20}
DEPTH = 2
FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 8, "cpu_threads": 1,
    "skip_tokenizer_init": True, "disable_overlap_schedule": True, "speculative_algorithm": "NEXTN",
    "speculative_num_steps": DEPTH, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": DEPTH + 1,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "bounded windows": {"chunked_prefill_size": 32, "page_size": 16, "max_running_requests": 2},
    "tp": {"tp_size": 2},
    "dp attention": {"tp_size": 2, "attn_dp_size": 2},
    "tokens that travel": {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"},
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MTPOracle]:
    folder = tmp_path_factory.mktemp("v4")
    path = make_agreeing(folder / "own", random.randrange(1 << 30))
    return path, MTPOracle(path, folder / "alone")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("form", FORMS)
def test_acceptance(oracle: tuple[Path, MTPOracle], form: str) -> None:
    path, mtp = oracle
    prompts = [[random.randrange(250) for _ in range(length)] for length in (1, 7, 40, 90)]
    with Engine(str(path), **FLAGS | FORMS[form]) as engine:
        outputs: Any = engine.generate(input_ids=prompts, sampling_params=GREEDY)
        again: Any = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    model, counts, wanted = load_v4(path), [], []
    for prompt, output, cached in zip(prompts, outputs, again):
        tokens = output["output_ids"]
        assert cached["output_ids"] == tokens
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()
        wanted.append(sum(chain_counts(mtp.chain, mtp.streams(prompt + tokens), prompt, tokens, DEPTH)[1]))
        counts.append(output["meta_info"]["spec_num_correct_drafts"])
    assert counts == wanted and 0 < sum(counts) < DEPTH * 4 * 20


def test_weights_of_another_checkpoint(oracle: tuple[Path, MTPOracle], tmp_path: Path) -> None:
    """All of them are replaced while serving, those of the streams, the entries and the MTP layer too."""
    path, _ = oracle
    prompt = [random.randrange(250) for _ in range(60)]
    other = make_v4(tmp_path, random.randrange(1 << 30), num_mtp_layers=1)
    with Engine(str(other), **FLAGS) as engine:
        first: Any = engine.generate(input_ids=prompt, sampling_params=GREEDY)
        engine._loop.run(WeightUpdates(engine._frontend).update(str(path), None, None))
        output: Any = engine.generate(input_ids=prompt, sampling_params=GREEDY)
    with Engine(str(path), **FLAGS) as engine:
        wanted: Any = engine.generate(input_ids=prompt, sampling_params=GREEDY)
    assert output["output_ids"] == wanted["output_ids"] != first["output_ids"]
    assert output["meta_info"]["spec_num_correct_drafts"] == wanted["meta_info"]["spec_num_correct_drafts"] > 0
