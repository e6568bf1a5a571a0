"""Vectors and scores of pooled models equal those of transformers, for any computation of a prompt."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine import Engine
from moe_engine.errors import ConfigError, InputError
from tests.models.checkpoints import headless, make_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")

FLAGS: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "chunked_prefill_size": 16}
LENGTHS = (1, 5, 16, 17, 70)
KINDS = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of different lengths; the last two share a prefix of three chunks."""
    found = [[random.randrange(250) for _ in range(length)] for length in LENGTHS]
    return [*found, found[-1][:50] + [random.randrange(250) for _ in range(9)]]


def states(path: Path, prompt: list[int]) -> Tensor:
    """The states [T, D] after the final norm, by transformers."""
    import transformers

    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([prompt])).last_hidden_state[0]


def vectors(engine: Engine, prompts: list[list[int]], **fields: Any) -> Tensor:
    outputs = engine.encode(input_ids=prompts, **fields)
    assert isinstance(outputs, list)
    return torch.tensor([output["embedding"] for output in outputs])


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-4


def sentence_transformer(path: Path, mode: str, *, normalizes: bool) -> None:
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    folders = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": folders[kind], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_lasttoken", "pooling_mode_max_tokens"}
    config = {"word_embedding_dimension": 64, **{name: name == mode for name in modes}}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), seed=5)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(model_path=str(checkpoint), is_embedding=True, **FLAGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(checkpoint: Path, prompts: list[list[int]]) -> Tensor:
    return torch.stack([F.normalize(states(checkpoint, prompt)[-1], dim=-1) for prompt in prompts])


def test_last_token_in_chunks_and_batches(engine: Engine, prompts: list[list[int]], expected: Tensor) -> None:
    assert_close(vectors(engine, prompts), expected)
    alone = torch.cat([vectors(engine, [prompt]) for prompt in prompts])
    assert_close(alone, expected)


def test_a_cached_prefix_changes_no_vector(engine: Engine, prompts: list[list[int]], expected: Tensor) -> None:
    engine.flush_cache()
    engine.encode(input_ids=prompts[-2])
    for again in prompts[-2:]:
        output = engine.encode(input_ids=again)
        assert isinstance(output, dict) and output["meta_info"]["cached_tokens"] >= 50
        assert_close(torch.tensor(output["embedding"]), expected[prompts.index(again)])


def test_answers_have_sglangs_shape(engine: Engine) -> None:
    one = engine.encode("hello", rid="mine")
    assert isinstance(one, dict) and set(one) == {"embedding", "meta_info"}
    meta = one["meta_info"]
    assert (meta["id"], meta["completion_tokens"]) == ("mine", 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["prompt_tokens"] == len(engine.tokenize("hello"))
    by_ids = engine.encode(input_ids=engine.tokenize("hello"))
    assert isinstance(by_ids, dict)
    assert_close(torch.tensor(by_ids["embedding"]), torch.tensor(one["embedding"]))


def test_dimensions_cut_and_normalize_again(engine: Engine, prompts: list[list[int]], expected: Tensor) -> None:
    assert_close(vectors(engine, prompts, dimensions=24), F.normalize(expected[:, :24], dim=-1))
    assert_close(vectors(engine, prompts, dimensions=64), expected)
    with pytest.raises(InputError, match="dimensions: 65 is more than the 64 numbers"):
        engine.encode("hello", dimensions=65)


def test_dimensions_that_the_checkpoint_lists(checkpoint: Path, expected: Tensor, prompts: list[list[int]]) -> None:
    listed = '{"matryoshka_dimensions": [16, 32]}'
    with Engine(model_path=str(checkpoint), is_embedding=True, json_model_override_args=listed, **FLAGS) as engine:
        assert_close(vectors(engine, prompts, dimensions=16), F.normalize(expected[:, :16], dim=-1))
        with pytest.raises(InputError, match=r"dimensions: 24 is not one of the model's 16, 32"):
            engine.encode("hello", dimensions=24)


def test_an_embedding_engine_refuses_text(engine: Engine) -> None:
    with pytest.raises(InputError, match="served for vectors, not for text"):
        engine.generate("hello")
    with pytest.raises(TypeError, match="no field 'sampling'"):
        engine.encode("hello", sampling={})
    with pytest.raises(InputError, match="exactly one of prompt and input_ids"):
        engine.encode()


@pytest.mark.each_value
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token", "lasttoken"])
def test_pooling_of_sentence_transformers_files(
    checkpoint: Path, prompts: list[list[int]], tmp_path: Path, mode: str, normalizes: bool
) -> None:
    """Checkpoint without a head and without a prefix of its names, as sentence-transformers saves it."""
    path = headless(checkpoint, tmp_path / "model")
    sentence_transformer(path, f"pooling_mode_{mode}", normalizes=normalizes)
    reduce = {"mean_tokens": lambda s: s.mean(0), "cls_token": lambda s: s[0], "lasttoken": lambda s: s[-1]}[mode]
    want = torch.stack([reduce(states(path, prompt)) for prompt in prompts])
    with Engine(model_path=str(path), **FLAGS) as engine:
        for _ in range(2):  # the second time with a cached prefix, if possible
            assert_close(vectors(engine, prompts), F.normalize(want, dim=-1) if normalizes else want)
        cut = want[:, :24]
        assert_close(vectors(engine, prompts, dimensions=24), F.normalize(cut, dim=-1) if normalizes else cut)
        flags = engine.get_server_info()
    assert flags["is_embedding"] is True
    assert flags["disable_radix_cache"] is (mode != "lasttoken")


def test_modules_that_are_not_available(checkpoint: Path, tmp_path: Path) -> None:
    path = headless(checkpoint, tmp_path / "model")
    sentence_transformer(path, "pooling_mode_max_tokens", normalizes=True)
    with pytest.raises(ConfigError, match="pooling by pooling_mode_max_tokens is not available yet"):
        Engine(model_path=str(path))
    modules = json.loads((path / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.Dense"
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="module Dense is not available yet"):
        Engine(model_path=str(path))
    (path / "modules.json").unlink()
    with pytest.raises(ConfigError, match="is_causal"):
        Engine(model_path=str(path), json_model_override_args='{"is_causal": false}')
    for flags, words in (
        ({"speculative_algorithm": "NGRAM"}, "no token is generated"),
        ({"enable_torch_compile": True}, "compiles decodes"),
    ):
        with pytest.raises(ConfigError, match=words):
            Engine(model_path=str(path), **flags)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("parallel", [{"tp_size": 2}, {"dp_size": 2}], ids=["tensor parallel", "replicas"])
def test_two_ranks_give_the_vectors_of_one(
    checkpoint: Path, prompts: list[list[int]], expected: Tensor, parallel: dict[str, Any]
) -> None:
    with Engine(model_path=str(checkpoint), is_embedding=True, **parallel, **FLAGS) as engine:
        assert_close(vectors(engine, prompts), expected)


@pytest.mark.drawn(4)
def test_attention_groups_give_the_vectors_of_one(tmp_path: Path, prompts: list[list[int]]) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path / "model", seed=6)
    want = torch.stack([F.normalize(states(path, prompt)[-1], dim=-1) for prompt in prompts])
    flags = FLAGS | {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "chunked_prefill_size": 32}
    with Engine(model_path=str(path), is_embedding=True, **flags) as engine:
        assert_close(vectors(engine, prompts), want)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("kind", KINDS)
def test_classifiers_give_transformers_scores(kind: str, prompts: list[list[int]], tmp_path: Path) -> None:
    import transformers

    plain = make_checkpoint(kind, tmp_path / "plain", seed=7)
    path = headless(plain, tmp_path / "model", score_weight=torch.randn(3, 64))
    oracle = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        want = torch.cat([oracle(torch.tensor([prompt])).logits for prompt in prompts])
    with Engine(model_path=str(path), **FLAGS) as engine:
        got = vectors(engine, prompts)
        with pytest.raises(InputError, match=r"dimensions: .* has a score head"):
            engine.encode("hello", dimensions=2)
    assert got.shape == want.shape
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).max() < 1e-4


@pytest.mark.drawn(4)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_reward_model(prompts: list[list[int]], tmp_path: Path, tp_size: int) -> None:
    plain = make_checkpoint("qwen2", tmp_path / "plain", seed=8)
    first, bias, second, last = torch.randn(64, 64) / 8, torch.randn(64), torch.randn(1, 64), torch.randn(1)
    scores = {"score_0_weight": first, "score_0_bias": bias, "score_2_weight": second, "score_2_bias": last}
    path = headless(plain, tmp_path / "model", **scores)
    head = [F.linear(F.relu(F.linear(states(plain, prompt)[-1], first, bias)), second, last) for prompt in prompts]
    with Engine(model_path=str(path), tp_size=tp_size, **FLAGS) as engine:
        assert_close(vectors(engine, prompts), torch.stack(head))
