"""Experts of each token (`return_routed_experts`) against transformers' routers: cached prefixes, chunks, retractions,
several ranks."""

from __future__ import annotations

import base64
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_engine import Engine
from moe_engine.errors import ConfigError, InputError
from tests.models import sparse
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")

NAME = "enable_return_routed_experts"
SAMPLING = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    return make_checkpoint(request.param, folder, random.randrange(1000), tokenizer=False)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def open_engine(path: Path, **flags: Any) -> Engine:
    plain = {
        "max_total_tokens": 512, "max_running_requests": 8, "chunked_prefill_size": 16, "dtype": "float32",
        "cpu_threads": 1, "skip_tokenizer_init": True, NAME: True, "context_length": 128,
    }  # fmt: skip
    return Engine(str(path), **{**plain, **flags})


def routed_by(model: Any, tokens: list[int]) -> tuple[np.ndarray, float]:
    """Experts [tokens, layers, K] by transformers, in ascending order (dense layers: 0), and how clear the choices
    are."""
    found: dict[int, np.ndarray] = {}
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, args, i=i: found.update({i: args[1].numpy()}))
        for i, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "experts")
    ]
    with torch.no_grad():
        _, margin = sparse.with_margin(lambda: model(torch.tensor([tokens])))
    for hook in hooks:
        hook.remove()
    none = np.zeros_like(next(iter(found.values())))
    return np.sort(np.stack([found.get(i, none) for i in range(len(model.model.layers))], axis=1)), margin


def clear_tokens(model: Any, count: int) -> list[int]:
    """Random tokens with clear choices: all prompts that begin with unclear ones would be unclear."""

    def draw() -> list[int]:
        tokens = [random.randrange(3, 300) for _ in range(count)]
        model(torch.tensor([tokens]))
        return tokens

    with torch.no_grad():
        return sparse.clear_draw(draw)


def decoded(output: dict[str, Any], config: Any) -> np.ndarray:
    """As slime, miles and verl decode it."""
    flat = np.frombuffer(base64.b64decode(output["meta_info"]["routed_experts"]), dtype=np.int32)
    return np.sort(flat.reshape(-1, config.num_hidden_layers, config.num_experts_per_tok))


def assert_experts(oracle: Any, prompt: list[int], output: dict[str, Any], start: int = 0) -> bool:
    """Whether the choices were clear enough to be compared."""
    tokens, found = prompt + output["output_ids"][:-1], decoded(output, oracle.config)
    assert len(found) == len(tokens) - start
    expected, margin = routed_by(oracle, tokens)
    if margin > sparse.MARGIN:
        np.testing.assert_array_equal(found, expected[start:])
    return margin > sparse.MARGIN


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"tp_size": 2, "enable_mixed_chunk": True},
        {"max_total_tokens": 128, "schedule_conservativeness": 0.0, "page_size": 4},
        {"tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": "allgather"},
    ],
    ids=["one rank", "tp2", "retractions", "dp2 with a dispatcher"],
)
def test_experts_equal_transformers(checkpoint: Path, oracle: Any, flags: dict[str, Any]) -> None:
    shared = clear_tokens(oracle, 20)
    prompts = [shared + [random.randrange(3, 300) for _ in range(random.randint(1, 30))] for _ in range(6)]
    asked = [random.random() < 0.7 for _ in prompts[1:]] + [True]
    start = random.randrange(20)
    with open_engine(checkpoint, **flags) as engine:
        first: Any = engine.generate(input_ids=prompts[:3], sampling_params=SAMPLING)  # leaves cached prefixes
        outputs: Any = engine.generate(input_ids=prompts, sampling_params=SAMPLING, return_routed_experts=asked)
        assert [o["output_ids"] for o in outputs[:3]] == [o["output_ids"] for o in first]
        assert ["routed_experts" in o["meta_info"] for o in outputs] == asked
        if "max_total_tokens" not in flags:
            assert any(o["meta_info"]["cached_tokens"] for o, was_asked in zip(outputs, asked) if was_asked)
        else:
            assert engine.get_server_info()["internal_states"][0]["num_retractions_total"], "the pool was too small"
        clear = [assert_experts(oracle, p, o) for p, o, was_asked in zip(prompts, outputs, asked) if was_asked]
        copies: Any = engine.generate(
            input_ids=prompts[0], sampling_params={**SAMPLING, "n": 2, "max_new_tokens": 1},
            return_routed_experts=True, routed_experts_start_len=start,
        )  # fmt: skip
        stream: Any = engine.generate(
            input_ids=prompts[1], sampling_params=SAMPLING, return_routed_experts=True, stream=True
        )
        chunks = list(stream)
        assert not any("routed_experts" in chunk["meta_info"] for chunk in chunks[:-1])
        clear += [assert_experts(oracle, prompts[0], copy, start) for copy in copies]
        clear.append(assert_experts(oracle, prompts[1], chunks[-1]))
        assert any(clear)


def test_refusals(checkpoint: Path) -> None:
    for flags in (
        {"speculative_algorithm": "NGRAM"},
        {"enable_return_hidden_states": True},
        {"enable_hierarchical_cache": True},
        {"expert_distribution_recorder_mode": "stat"},
        {"tp_size": 2, "attn_dp_size": 2},
    ):
        with pytest.raises(ConfigError, match="--enable-return-routed-experts: not available yet with "):
            open_engine(checkpoint, **flags)
    with open_engine(checkpoint) as engine, pytest.raises(InputError, match="routed_experts_start_len: the prompt has"):
        engine.generate(input_ids=[5, 6], return_routed_experts=True, routed_experts_start_len=3)
    with (
        open_engine(checkpoint, **{NAME: False}) as engine,
        pytest.raises(InputError, match=f"--{NAME}".replace("_", "-")),
    ):
        engine.generate(input_ids=[5, 6], return_routed_experts=True)
