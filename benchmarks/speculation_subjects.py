"""Models of the speculation benchmark: with realistic draft agreement, at a chosen rate, or without.

No command; used by `benchmarks.speculation`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from moe_engine.tuning.datasets import Vocabulary

SUBJECTS = ("embedded", "agreeing", "random")
MIN_REQUESTS = 4
"""Min requests of a round, so that a round of low concurrency is long enough to be measured."""
ANSWER_LEN = 64
"""Max output tokens of the embedded model, as in its report."""
Offline = Callable[[int, list[list[int]], list[list[int]]], list[float]]


@dataclass(frozen=True)
class Subject:
    """A model and its requests. `path` None: the embedded model.

    `prompts(concurrency, turn)` are the prompts of a round. `offline(depth, prompts, answers)` computes, without the
    engine, the share of drafts at each position that are correct with all before. `gains`: speculation pays off.
    """

    name: str
    path: Path | None
    text: str
    prompts: Callable[[int, int], list[list[int]]]
    sampling: dict[str, Any]
    offline: Offline
    gains: bool = True


def make_subject(name: str, args: argparse.Namespace) -> Subject:
    """The subject with that name of `SUBJECTS`, from the benchmark's options; writes a missing checkpoint."""
    if name == "embedded":
        return embedded(args.questions)
    if name == "agreeing":
        return agreeing(args.shape, args.agreement, args.input_len, args.output_len)
    return random_weights(args.shape, args.input_len, args.output_len)


def embedded(questions: int) -> Subject:
    """The embedded model, answering completely the questions of its offline acceptance measurement.

    Args:
        questions: per task; 8 as in the report.
    """
    from moe_engine.demo import CHECKPOINT_DIR
    from moe_engine.demo.training.corpus import held_out

    encode = Vocabulary.from_path(CHECKPOINT_DIR).encode
    by_task: dict[str, list[str]] = {}
    for example in held_out():
        by_task.setdefault(example.task, []).append(example.prompt)
    chosen = [p for group in by_task.values() for p in group[:: max(1, len(group) // questions)][:questions]]
    prompts = [encode(prompt) for prompt in chosen]
    random.Random(0).shuffle(prompts)  # mixes long and short answers
    return Subject(
        name="embedded",
        path=None,
        text=f"the embedded model, {len(prompts)} questions of {len(by_task)} tasks, max {ANSWER_LEN} out",
        prompts=lambda concurrency, turn: prompts,
        sampling={"temperature": 0.0, "max_new_tokens": ANSWER_LEN},
        offline=_embedded_offline,
    )


def _embedded_offline(depth: int, prompts: list[list[int]], answers: list[list[int]]) -> list[float]:
    """Acceptance with the training model's drafts. The model's report drafts at every position, which gives higher
    rates: chains here often start after a rejected draft, where the text is harder."""
    from moe_engine.demo import CHECKPOINT_DIR
    from moe_engine.demo.training.checkpoint import load_checkpoint
    from moe_engine.demo.training.evaluate import draft

    model = load_checkpoint(CHECKPOINT_DIR)
    chains = []
    for prompt, answer in zip(prompts, answers):
        text = prompt + answer
        chains.append(draft(model, text, len(prompt) - 1).tolist() if len(answer) > 1 else [])
    return taken(depth, answers, chains)


def agreeing(shape: str, agreement: float, input_len: int, output_len: int) -> Subject:
    """A checkpoint with a chosen share of correct drafts."""
    from benchmarks.agreeing_checkpoint import ensure_agreeing_checkpoint

    path = ensure_agreeing_checkpoint(agreement, shape)

    def offline(depth: int, prompts: list[list[int]], answers: list[list[int]]) -> list[float]:
        drafted = drafts_by_token(path, sorted({token for answer in answers for token in answer}))
        chains: list[list[list[int]]] = []
        for answer in answers:
            chains.append([])
            for token in answer:
                chain = [token]
                for _ in range(depth):  # drafts after a wrong draft are irrelevant
                    chain.append(drafted.get(chain[-1], -1))
                chains[-1].append(chain[1:])
        return taken(depth, answers, chains)

    text = f"{shape}, about {agreement:.0%} of drafts correct, {input_len} in, {output_len} out"
    return _with_random_prompts("agreeing", path, text, input_len, output_len, offline, gains=agreement > 0)


def drafts_by_token(path: Path, tokens: list[int]) -> dict[int, int]:
    """The MTP draft of an agreeing checkpoint after each token: it depends only on the token and on few matrices."""
    embedding, head = (_tensor(path, f"{name}.weight") for name in ("model.embed_tokens", "lm_head"))
    config = json.loads((path / "config.json").read_text())
    layer = f"model.layers.{config['num_hidden_layers']}"
    norm, out = _tensor(path, f"{layer}.enorm.weight"), _tensor(path, f"{layer}.shared_head.norm.weight")
    passed = _tensor(path, f"{layer}.eh_proj.weight")[:, : embedding.shape[1]]
    drafts = ((embedding[tokens] * norm) @ passed.T * out) @ head.T
    return dict(zip(tokens, drafts.argmax(1).tolist()))


def _tensor(path: Path, name: str) -> Tensor:
    shard = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(path / shard, framework="pt") as file:
        return file.get_tensor(name).float()


def random_weights(shape: str, input_len: int, output_len: int) -> Subject:
    """A checkpoint whose drafts are never correct."""
    from benchmarks.checkpoints import ensure_checkpoint

    path = ensure_checkpoint(shape, num_nextn_predict_layers=1)
    text = f"{shape}, no draft correct, {input_len} in, {output_len} out"
    return _with_random_prompts("random", path, text, input_len, output_len, lambda depth, *_: [0.0] * depth)


def _with_random_prompts(
    name: str, path: Path, text: str, input_len: int, output_len: int, offline: Offline, *, gains: bool = False
) -> Subject:
    """New random prompts in every round, and answers of equal length."""
    plain = Vocabulary.from_path(path).plain_ids

    def prompts(concurrency: int, turn: int) -> list[list[int]]:
        rng = random.Random(f"{concurrency} {turn}")
        return [rng.choices(plain, k=input_len) for _ in range(max(concurrency, MIN_REQUESTS))]

    sampling = {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": True}
    return Subject(name, path, text, prompts, sampling, offline, gains)


def taken(depth: int, answers: list[list[int]], chains: list[list[list[int]]]) -> list[float]:
    """Share correct at each position, with all before, of an engine's chains: each starts at the end of the previous
    chain.

    Args:
        chains: chains[i][p] are the drafts after token p of answer i.
    """
    accepted, proposed = [0] * depth, [0] * depth
    for answer, drafts in zip(answers, chains):
        root = 0
        while root + 1 < len(answer):
            pairs = list(zip(drafts[root][:depth], answer[root + 1 :]))
            good = next((i for i, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
            for i in range(len(pairs)):
                proposed[i] += 1
                accepted[i] += i < good
            root += good + 1
    return [a / p for a, p in zip(accepted, proposed) if p]
