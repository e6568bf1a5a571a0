"""Drafts of Step's MTP layers in whole engines: tokens of transformers, the acceptance of an offline count."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine import Engine
from moe_engine.errors import ConfigError
from moe_engine.frontend.weights.weight_updates import WeightUpdates
from tests.engine.harness import InProcessEngine
from tests.engine.test_v4_mtp import FLAGS, GREEDY
from tests.engine.test_windows import make_script, pool_rows
from tests.models.step_mtp import StepOracle
from tests.speculation.agreeing import agreeing_checkpoint
from tests.speculation.eagle_heads import chain_counts

pytestmark = pytest.mark.usefixtures("forked_processes")

DEPTH = 4
CHAIN: dict[str, Any] = {"speculative_num_steps": DEPTH, "speculative_num_draft_tokens": DEPTH + 1}
FORMS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "bounded windows": {"chunked_prefill_size": 32, "page_size": 16, "max_running_requests": 2},
    "tp": {"tp_size": 2},
    "ep": {"tp_size": 2, "ep_size": 2},
    "dp attention": {"tp_size": 2, "attn_dp_size": 2},
    "dp and tp": {
        "tp_size": 4,
        "attn_dp_size": 2,
        "chunked_prefill_size": 64,
        "page_size": 16,
        "max_running_requests": 4,
    },
    "tokens that travel": {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"},
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StepOracle]:
    path = agreeing_checkpoint("step3p7", tmp_path_factory.mktemp("step"), random.randrange(1 << 30), num_mtp_layers=3)
    return path, StepOracle(path)


def check_acceptance(path: Path, mtp: Any, windows: bool = False, **flags: Any) -> None:
    """Tokens and accepted drafts of an engine are those of an oracle of the model and its MTP layers."""
    prompts = [[random.randrange(250) for _ in range(length)] for length in (1, 7, 40, 90)]
    with Engine(str(path), **FLAGS | CHAIN | flags) as engine:
        outputs: Any = engine.generate(input_ids=prompts, sampling_params=GREEDY)
        again: Any = engine.generate(input_ids=prompts, sampling_params=GREEDY)
        assert bool(engine.config.num_window_slots) == windows
    counts, wanted = [], []
    for prompt, output, cached in zip(prompts, outputs, again):
        tokens = output["output_ids"]
        assert cached["output_ids"] == tokens
        with torch.no_grad():
            logits = mtp.model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()
        wanted.append(sum(chain_counts(mtp.chain, mtp.states(prompt + tokens), prompt, tokens, DEPTH)[1]))
        counts.append(output["meta_info"]["spec_num_correct_drafts"])
    assert counts == wanted and 0 < sum(counts) < DEPTH * 4 * 20


@pytest.mark.drawn(2)
@pytest.mark.parametrize("form", FORMS)
def test_acceptance(oracle: tuple[Path, StepOracle], form: str) -> None:
    check_acceptance(*oracle, windows="chunked_prefill_size" in FORMS[form], **FORMS[form])


def test_windows_are_bounded(oracle: tuple[Path, StepOracle], tmp_path: Path) -> None:
    """The pool of windows has the KV of the MTP layers too, and positions that they compute again."""
    path, _ = oracle
    flags = {name: FLAGS[name] for name in FLAGS if name.startswith("speculative")} | CHAIN
    flags |= {"dtype": "float32", "max_total_tokens": 700, "max_running_requests": 4, "chunked_prefill_size": 32}
    engine = InProcessEngine(path, tmp_path / "status", **flags)
    try:
        slots, config = engine.config.num_window_slots, engine.config
        assert 0 < slots < 700 and config.window == 20 + 2
        assert pool_rows(engine) == [700 + 1, slots + 1, 700 + 1, *(slots + 1,) * 3]
        assert engine.worker.info.kv_bytes == config.ledger.kv_bytes + config.ledger.bytes_of("KV of windows")
        script = make_script(random.Random(random.randrange(1 << 30)), 6)
        answers = engine.run(script, overlap=False)
        together = {item.rid: answers[item.rid].token_ids for item in script}
        assert {rid: answer.token_ids for rid, answer in engine.run(script).items()} == together
    finally:
        engine.close()


def test_weights_of_another_checkpoint(oracle: tuple[Path, StepOracle], tmp_path: Path) -> None:
    """All of them are replaced while serving, heads and norms of the MTP layers too."""
    path, _ = oracle
    prompts = [[random.randrange(250) for _ in range(60)] for _ in range(4)]
    other = agreeing_checkpoint("step3p7", tmp_path, random.randrange(1 << 30), num_mtp_layers=3)

    def answers(engine: Engine) -> tuple[list[list[int]], int]:
        """Tokens, and how many drafts were accepted in all."""
        found: Any = engine.generate(input_ids=prompts, sampling_params=GREEDY)
        accepted = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in found)
        return [answer["output_ids"] for answer in found], accepted

    with Engine(str(other), **FLAGS | CHAIN) as engine:
        first, _ = answers(engine)
        engine._loop.run(WeightUpdates(engine._frontend).update(str(path), None, None))
        output = answers(engine)
    with Engine(str(path), **FLAGS | CHAIN) as engine:
        wanted = answers(engine)
    assert output == wanted and wanted[0] != first and wanted[1] > 0


def test_refusals(oracle: tuple[Path, StepOracle], tmp_path: Path) -> None:
    tree = {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}
    path, exported = oracle[0], tmp_path / "config.json"
    with pytest.raises(ConfigError, match="draft trees need layers without a sliding window"):
        Engine(str(path), **FLAGS | tree)
    exported.write_text('{"architectures": ["Step3p5ForCausalLMNextN"]}')
    with pytest.raises(ConfigError, match="exported on their own are not supported"):
        Engine(str(path), **FLAGS | {"speculative_draft_model_path": str(tmp_path)})
