"""Models with a state for each request on several ranks: divided channels of the state, or one scheduler per rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine import Engine
from tests.engine.test_host_tier import LIMITS
from tests.engine.test_state_tier import FLAGS as STORED
from tests.engine.test_states import FLAGS, check, registered  # noqa: F401  # a fixture
from tests.models import ema
from tests.models.checkpoints import make_checkpoint


@pytest.mark.usefixtures("registered", "forked_processes")
@pytest.mark.parametrize(
    "form",
    [pytest.param({"tp_size": 2}, marks=pytest.mark.exhaustive), {"tp_size": 2, "attn_dp_size": 2}],
    ids=["tp2", "dp2"],
)
def test_answers_equal_a_recomputation(form: dict[str, Any], tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    path = ema.make_ema_checkpoint("qwen3", tmp_path / "model", seed)
    prompts = [[rng.randrange(250) for _ in range(rng.choice([1, 30, 70]))] for _ in range(16)]
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 20}
    with Engine(model_path=str(path), device="cpu", **FLAGS, **form) as engine:
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    model = ema.reference(path)
    for prompt, output in zip(prompts, outputs):
        logprobs = [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]
        assert len(logprobs) == 20
        check(model, prompt, output["output_ids"], logprobs)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forked_processes")
def test_two_ranks_find_their_states_in_the_storage(tmp_path: Path) -> None:
    """Qwen3-Next with divided states, which each rank stores: a second engine reads KV and states of the first."""
    import transformers

    seed = random.randrange(2**31)
    rng = random.Random(seed)
    path = make_checkpoint("qwen3_next", tmp_path / "model", seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    flags = LIMITS | STORED | {"tp_size": 2, "device": "cpu", "hicache_storage_dir": str(tmp_path / "pages")}
    flags |= {"hicache_storage_prefetch_policy": "wait_complete"}
    texts = [[rng.randrange(250) for _ in range(48)] for _ in range(3)]
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 5}
    found = []
    for _ in range(2):
        with Engine(model_path=str(path), **flags) as engine:
            prompts = [[*text, *(rng.randrange(250) for _ in range(8))] for text in texts]
            outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        for prompt, output in zip(prompts, outputs):
            logprobs = [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]
            check(model.eval(), prompt, output["output_ids"], logprobs, tolerance=5e-4)
        found.append(sum(output["meta_info"]["cached_tokens_details"]["storage"] for output in outputs))
    assert found[0] == 0 and found[1] >= 3 * 40
