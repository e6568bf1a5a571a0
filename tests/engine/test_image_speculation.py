"""Drafts after images: tokens and log-probabilities of transformers, for every drafter, in chunks and retracted;
drafts of a head that sees the images' embeddings."""

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
from tests.speculation.eagle_heads import LAYERS, TAPS, Form, ReferenceHead

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


def target_of(oracle: Oracle) -> Any:
    return SimpleNamespace(config=oracle.model.config.text_config, embedding=oracle.model.get_input_embeddings())


def drafter(oracle: Oracle, algorithm: str, folder: Path) -> dict[str, Any]:
    """Flags of a drafter with random weights."""
    if algorithm == "EAGLE3":
        found = ReferenceHead(Form(), target_of(oracle), random.randrange(1000)).write(folder)
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


SECTIONS = (2, 3, 3)
THETA = 3.0
"""All pairs turn fast, so that each axis matters."""
AXES = [axis for axis, count in enumerate(SECTIONS) for _ in range(count)] * 2
DOUBT = 1e-3
"""Best two draft logits that are closer than this: rounding decides between them."""


class Text:
    """What a head sees of a prompt and its answer: input embeddings [T, D], states [T, F] and positions [3, T]."""

    @torch.no_grad()
    def __init__(self, oracle: Oracle, ids: list[int], images: list[Pixels]) -> None:
        inner, seen = oracle.model.model.language_model, {}

        def note(module: Any, args: Any, given: dict[str, Any]) -> None:
            seen["positions"] = given["position_ids"]

        handle = inner.register_forward_pre_hook(note, with_kwargs=True)
        states = oracle.run(ids, images, output_hidden_states=True).hidden_states
        handle.remove()
        self.embedding = states[0][0].double()
        self.states = torch.cat([states[layer + 1][0] for layer in TAPS], dim=-1).double()
        places = torch.arange(len(ids)).expand(3, -1)
        self.positions = places if seen["positions"] is None else seen["positions"][-3:, 0]


def chain(head: ReferenceHead, text: Text, known: int, depth: int, axes: bool) -> list[int]:
    """Greedy drafts after `known` tokens, up to one that is in doubt."""
    hidden, embedding, drafts = head.prepare(text.states[: known - 1]), text.embedding[1:known], []
    positions = text.positions[:, : known - 1]
    for _ in range(depth):
        own = [head.rotary(axis) for axis in positions]
        if axes:
            columns = [[part[0, :, i] for part in own[axis]] for i, axis in enumerate(AXES)]
            rotary = torch.stack([c for c, _ in columns], -1)[None], torch.stack([s for _, s in columns], -1)[None]
        else:
            rotary = own[0]
        v = head.over(embedding, hidden, rotary)
        best = head.logits(v[-1:])[0].topk(2)
        if best.values[0] - best.values[1] < DOUBT:
            break
        drafts.append(int(head.ids[best.indices[0]]))
        hidden = torch.cat((hidden, v[-1:]))
        embedding = torch.cat((embedding, head.target.embedding(torch.tensor(drafts[-1:])).double()))
        positions = torch.cat((positions, positions[:, -1:] + 1), 1)
    return drafts


@pytest.mark.drawn(1)
@pytest.mark.parametrize("axes", [True, False])
@pytest.mark.parametrize("chunk", [None, 7])
def test_a_head_sees_the_embeddings_of_images(tmp_path: Path, axes: bool, chunk: int | None) -> None:
    """Every chain of the engine is that of a float64 reference, whose inputs are transformers' input embeddings; with
    and without three axes in the head, in chunks that end inside an image, and after a cached image."""
    path = make_checkpoint("qwen2_5_vl", tmp_path / "model", random.randrange(1000), num_hidden_layers=LAYERS)
    oracle = Oracle(path)
    head = ReferenceHead(Form(fields={"rope_theta": THETA}), target_of(oracle), random.randrange(1000))
    scaling = {"rope_scaling": {"type": "mrope", "mrope_section": list(SECTIONS)}, "rope_parameters": None}
    scaling |= {"rope_theta": THETA}
    flags = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head.write(tmp_path / "head", **(
        scaling if axes else {}
    )))}  # fmt: skip
    engine = InProcessEngine(path, tmp_path / "status", dtype="float32", max_total_tokens=1024, **flags, **CHAIN)
    drafter = engine.worker.runner.speculation.drafter
    proposed: list[tuple[int, list[int]]] = []
    propose = drafter.propose

    def noting(task: Any) -> Any:
        drafts = propose(task)
        proposed.append((int(task.lengths[0]), drafts.tokens[0].tolist()))
        return drafts

    drafter.propose = noting
    total = 0
    for ids, images, places in prompts(torch.Generator().manual_seed(random.randrange(2**31))):
        proposed.clear()
        form = {} if chunk is None else {"chunked_prefill_size": chunk}
        script = [scripted(rid, ids, images, places, COUNT, arrives=at) for rid, at in (("r", 0), ("again", 60))]
        answers = engine.run(script, overlap=False, **form)
        text = ids + answers["r"].token_ids
        seen = Text(oracle, text, images)
        for length, (root, *drafts) in proposed:
            assert root == text[length]
            expected = chain(head, seen, length + 1, 3, axes)
            assert drafts[: len(expected)] == expected, (length, len(ids))
            total += len(expected)
    assert total > 60
    engine.close()
