"""A launch from a GGUF file: tokens are those of the same values in hub layout."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.planning.prepare import prepare
from tests.engine.harness import InProcessEngine, Scripted
from tests.models.test_gguf import write_both

GREEDY = {"temperature": 0.0, "ignore_eos": True}
FLAGS = {"dtype": "float32", "max_total_tokens": 512, "max_running_requests": 4, "chunked_prefill_size": 32}


def test_tokens_of_an_engine(tmp_path: Path) -> None:
    path, plain = write_both(tmp_path, "qwen3", hidden_size=128, intermediate_size=128)
    script = [
        Scripted(
            rid=f"r{i}-",
            prompt_ids=[random.randrange(250) for _ in range(length)],
            arrives=i,
            logprob=True,
            sampling=GREEDY,
        )
        for i, length in enumerate((3, 40, 11))
    ]
    found = []
    for folder in (path, plain):
        engine = InProcessEngine(folder, tmp_path / f"status {len(found)}", **FLAGS)
        try:
            found.append(engine.run(script))
        finally:
            engine.close()
    num_equal = 0
    for rid, answer in found[0].items():
        other = found[1][rid]
        assert len(answer.token_ids) == len(other.token_ids) == 8
        for token, its, entry, its_entry in zip(answer.token_ids, other.token_ids, answer.logprobs, other.logprobs):
            assert entry.logprob == pytest.approx(its_entry.logprob, abs=1e-3)
            if token != its:  # a tie that rounding decides
                break
            num_equal += 1
    assert num_equal >= 12


def test_a_launch_knows_a_gguf_file_and_its_folder(tmp_path: Path) -> None:
    path, plain = write_both(tmp_path, "llama")
    alone = tmp_path / "alone"
    alone.mkdir()
    path = path.rename(alone / path.name)
    for flags in ({}, {"load_format": "gguf"}, {"quantization": "gguf"}, {"load_format": "dummy"}):
        config = prepare(EngineArgs.from_kwargs(model_path=str(alone), device="cpu", **flags))
        assert config.model_path == config.tokenizer_path == str(path)
        assert config.model.weight_format.name == "gguf"
    for flags, message in (
        ({"quantization": "int4"}, "declares gguf"),
        ({"load_format": "safetensors"}, "is a GGUF file"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(EngineArgs.from_kwargs(model_path=str(path), device="cpu", **flags))
    with pytest.raises(ConfigError, match=r"--load-format gguf: .* names no GGUF file"):
        prepare(EngineArgs.from_kwargs(model_path=str(plain), device="cpu", load_format="gguf"))
