"""Final hidden states of requests against transformers': chunks, cached prefixes, several ranks, retractions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_engine import Engine
from moe_engine.errors import ConfigError, InputError
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")

NAME = "enable_return_hidden_states"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("hidden"), random.randrange(1000), tokenizer=False)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def open_engine(path: Path, **flags: Any) -> Engine:
    plain = {
        "max_total_tokens": 512, "max_running_requests": 8, "chunked_prefill_size": 16, "dtype": "float32",
        "cpu_threads": 1, "skip_tokenizer_init": True, NAME: True, "context_length": 128,
    }  # fmt: skip
    return Engine(str(path), **{**plain, **flags})


def assert_states(oracle: Any, prompt: list[int], output: dict[str, Any]) -> None:
    states, tokens = output["meta_info"]["hidden_states"], output["output_ids"]
    assert len(states) == len(tokens) and len(states[0]) == len(prompt)
    with torch.no_grad():
        ids = torch.tensor([prompt + tokens[:-1]])
        expected = oracle(ids, output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(torch.tensor(states[0] + states[1:]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"tp_size": 2, "enable_mixed_chunk": True},
        pytest.param({"tp_size": 2, "attn_dp_size": 2}, marks=pytest.mark.exhaustive),
        {"max_total_tokens": 128, "schedule_conservativeness": 0.0, "page_size": 4},
    ],
    ids=["one rank", "tp2", "dp2", "retractions"],
)
def test_states_equal_transformers(checkpoint: Path, oracle: Any, flags: dict[str, Any]) -> None:
    shared = [random.randrange(3, 300) for _ in range(20)]
    prompts = [shared + [random.randrange(3, 300) for _ in range(random.randint(1, 30))] for _ in range(6)]
    asked = [random.random() < 0.7 for _ in prompts[1:]] + [True]
    sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    with open_engine(checkpoint, **flags) as engine:
        plain: Any = engine.generate(input_ids=prompts, sampling_params=sampling)  # leaves cached prefixes
        outputs: Any = engine.generate(input_ids=prompts, sampling_params=sampling, return_hidden_states=asked)
        for prompt, output, was_asked, other in zip(prompts, outputs, asked, plain):
            assert output["output_ids"] == other["output_ids"]
            assert ("hidden_states" in output["meta_info"]) == was_asked
            if was_asked:
                assert output["meta_info"]["cached_tokens"] == 0
                assert_states(oracle, prompt, output)
        if flags.get("max_total_tokens"):
            assert engine.get_server_info()["internal_states"][0]["num_retractions_total"], "the pool was too small"
        copies: Any = engine.generate(
            input_ids=prompts[0], sampling_params={**sampling, "n": 2, "max_new_tokens": 1}, return_hidden_states=True
        )
        stream: Any = engine.generate(
            input_ids=prompts[1], sampling_params=sampling, return_hidden_states=True, stream=True
        )
        chunks = list(stream)
        assert not any("hidden_states" in chunk["meta_info"] for chunk in chunks[:-1])
        for prompt, output in ((prompts[0], copies[0]), (prompts[0], copies[1]), (prompts[1], chunks[-1])):
            assert_states(oracle, prompt, output)


def test_refusals(checkpoint: Path) -> None:
    for flag in ({"speculative_algorithm": "NGRAM"}, {"enable_two_batch_overlap": True}):
        with pytest.raises(ConfigError, match="--enable-return-hidden-states: not available yet with --"):
            open_engine(checkpoint, **flag)
    with (
        open_engine(checkpoint, **{NAME: False}) as engine,
        pytest.raises(InputError, match=f"--{NAME}".replace("_", "-")),
    ):
        engine.generate(input_ids=[5, 6], return_hidden_states=True)
