"""Drafts behind images: tokens and log-probabilities of transformers, for every drafter, in chunks and retracted."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import InProcessEngine
from tests.engine.test_image_requests import assert_equal, prompts, scripted
from tests.models.checkpoints import make_checkpoint as make_text
from tests.models.vision_checkpoints import Oracle, Pixels, make_checkpoint
from tests.speculation.eagle_heads import LAYERS, Form, ReferenceHead

COUNT = 12
Asked = tuple[list[int], list[Pixels], list[int]]
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
WAYS: dict[str, dict[str, Any]] = {
    "n-grams": {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 4,
        "speculative_ngram_min_match_window_size": 1,
    },
    "tree of a head": {"speculative_algorithm": "EAGLE3", **TREE},
    "chain of a head": {"speculative_algorithm": "EAGLE3", **CHAIN},
    "draft model": {"speculative_algorithm": "STANDALONE", **CHAIN},
}
OFTEN = ("n-grams", "tree of a head")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose next token depends mostly on the last one, in cycles of four, so that drafts are right; images
    change the log-probabilities."""
    folder = make_checkpoint(
        random.choice(("qwen2_5_vl", "qwen3_vl")),
        tmp_path_factory.mktemp("model"),
        random.randrange(1000),
        num_hidden_layers=LAYERS,
    )
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".visual." not in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.1
    (embedding,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    embedding *= 2
    last = torch.arange(256)
    tensors["lm_head.weight"][last // 4 * 4 + (last + 1) % 4] = embedding[last] * 2
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(path)


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return prompts(torch.Generator().manual_seed(random.randrange(2**31)))


@pytest.fixture(scope="module")
def expected(oracle: Oracle, asked: list[Asked]) -> list[list[tuple[int, float]]]:
    return [oracle.greedy(ids, images, COUNT) for ids, images, _ in asked]


def drafter(oracle: Oracle, algorithm: str, folder: Path) -> dict[str, Any]:
    """Flags of a drafter with random weights."""
    if algorithm == "EAGLE3":
        target: Any = SimpleNamespace(
            config=oracle.model.config.text_config, embedding=oracle.model.get_input_embeddings()
        )
        found = ReferenceHead(Form(), target, random.randrange(1000)).write(folder)
    elif algorithm == "STANDALONE":
        found = make_text(
            "qwen2", folder, random.randrange(1000), vocab_size=oracle.model.config.text_config.vocab_size
        )
    else:
        return {}
    return {"speculative_draft_model_path": str(found)}


@pytest.mark.parametrize(
    "way", [way if way in OFTEN else pytest.param(way, marks=pytest.mark.exhaustive) for way in WAYS]
)
def test_equal_to_transformers(
    path: Path, oracle: Oracle, asked: list[Asked], expected: list[list[tuple[int, float]]], tmp_path: Path, way: str
) -> None:
    flags = WAYS[way] | drafter(oracle, WAYS[way]["speculative_algorithm"], tmp_path / "drafter")
    flags |= {"dtype": "float32", "max_total_tokens": 1024, "max_running_requests": 4}
    engine = InProcessEngine(path, tmp_path / "status", **flags)
    forms: list[dict[str, Any]] = [{}, {"chunked_prefill_size": 7, "num_slots": 90, "schedule_conservativeness": 0.0}]
    for form in forms:
        script = [scripted(f"r{i}", *one, count=COUNT, arrives=2 * i) for i, one in enumerate(asked)]
        script += [scripted(f"again{i}", *one, count=COUNT, arrives=60) for i, one in enumerate(asked)]
        answers = engine.run(script, **form)
        for i, wanted in enumerate(expected):
            assert_equal(answers[f"r{i}"], wanted, COUNT)
            assert_equal(answers[f"again{i}"], wanted, COUNT)
        stats = engine.scheduler.stats().speculation
        assert stats is not None and sum(stats.proposed) > 0
        assert way != "n-grams" or sum(stats.accepted) > 0
    engine.close()
