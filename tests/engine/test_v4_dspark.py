"""Blocks of DeepSeek V4's DSpark layers in whole engines: transformers' tokens, the acceptance of an offline count."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from moe_engine import Engine
from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.planning.prepare import prepare
from tests.models.v4_dspark import DSparkOracle, make_dspark
from tests.models.v41_dspark import V41DSparkReference
from tests.speculation.eagle_heads import chain_counts

pytestmark = pytest.mark.usefixtures("forked_processes")

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 16}
FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 8, "cpu_threads": 1,
    "skip_tokenizer_init": True, "disable_overlap_schedule": True, "speculative_algorithm": "DSPARK",
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "bounded windows": {
        "chunked_prefill_size": 32, "page_size": 16, "max_running_requests": 2, "speculative_num_steps": 2,
    },
    "tp": {"tp_size": 2, "speculative_num_steps": 3},
    "dp attention": {"tp_size": 2, "attn_dp_size": 2},
    "tokens that travel": {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"},
}  # fmt: skip


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DSparkOracle]:
    folder = tmp_path_factory.mktemp("v4")
    path = make_dspark(folder / "own", random.randrange(1 << 30), agreeing=True)
    return path, DSparkOracle(path, folder / "alone")


def check_acceptance(path: Path, layers: DSparkOracle | V41DSparkReference, form: dict[str, Any]) -> None:
    """The engine has the tokens of the model, again from its cache, and accepts the drafts of an offline count."""
    depth = form.get("speculative_num_steps", 4)
    prompts = [[random.randrange(250) for _ in range(length)] for length in (1, 7, 40, 90)]
    with Engine(str(path), **FLAGS | form) as engine:
        outputs: Any = engine.generate(input_ids=prompts, sampling_params=GREEDY)
        again: Any = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    counts, wanted = [], []
    for prompt, output, cached in zip(prompts, outputs, again):
        tokens = output["output_ids"]
        assert cached["output_ids"] == tokens
        assert tokens == layers.logits(prompt + tokens[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        wanted.append(sum(chain_counts(layers.chain, layers.states(prompt + tokens), prompt, tokens, depth)[1]))
        counts.append(output["meta_info"]["spec_num_correct_drafts"])
    assert counts == wanted and sum(counts) > 0


@pytest.mark.drawn(1)
@pytest.mark.parametrize("form", FORMS)
def test_acceptance(oracle: tuple[Path, DSparkOracle], form: str) -> None:
    check_acceptance(*oracle, FORMS[form])


def test_without_drafts_and_with_other_drafters(oracle: tuple[Path, DSparkOracle]) -> None:
    """The model starts without its draft layers; NEXTN names the algorithm that it has."""
    path, _ = oracle
    more = {"model_path": str(path), "device": "cpu", "skip_tokenizer_init": True}
    assert prepare(EngineArgs.from_kwargs(**more)).speculation is None
    with pytest.raises(ConfigError, match="fill in blocks, and are no MTP layers; use --speculative-algorithm DSPARK"):
        prepare(EngineArgs.from_kwargs(**more, speculative_algorithm="NEXTN"))
    with pytest.raises(ConfigError, match="has DSpark layers; use --speculative-algorithm DSPARK"):
        prepare(EngineArgs.from_kwargs(**more, speculative_algorithm="DFLASH"))
    same = {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": str(path)}
    found = prepare(EngineArgs.from_kwargs(**more, **same)).speculation
    assert found is not None and (found.num_steps, found.draft_model_path) == (4, None)
