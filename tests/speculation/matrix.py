"""Speculation combined with all other features of the engine: the tokens of runs without it.

A case is one value of each factor below. It runs a script of requests on a tiny checkpoint and is compared with the
same script without speculation, aborts and limits.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from moe_engine.scheduler.events import SpecStats
from tests.engine.harness import Answer, InProcessEngine, Scripted
from tests.speculation.agreeing import agreeing_checkpoint

Case = Mapping[str, Any]

FACTORS: dict[str, tuple[Any, ...]] = {
    "drafter": ("nextn 1", "nextn 2", "deepseek", "llama", "ngram"),  # MTP layers, or family of the draft model
    "depth": (1, 2, 3, 4, "auto"),
    "topk": (1, 2, 4),
    "nodes": ("all", "half"),
    "requests": ("greedy", "sampled", "processors"),
    "shared": (False, True),  # prefixes
    "logprobs": (False, True),
    "radix": (True, False),
    "chunk": (-1, 16, 48),
    "page": (1, 4, 16),
    "mixed": (False, True),
    "overlap": (True, False),
    "pool": ("ample", "tiny"),
    "aborts": (False, True),
}
LOGPROB_TOLERANCE = 1e-4
VOCAB_SIZE, ORDINARY = 320, 250  # token ids from 250 on are special


def allowed(case: Case) -> bool:
    """Valid combinations: trees need probabilities and a fixed depth, only trees can drop nodes, only chunks mix."""
    chain_only = case.get("drafter") == "ngram" or case.get("depth") == "auto"
    if case.get("topk", 1) > 1 and chain_only:
        return False
    if case.get("nodes") == "half" and (case.get("topk") == 1 or chain_only):
        return False
    return not (case.get("mixed") and case.get("chunk") == -1)


@dataclass(frozen=True)
class Scale:
    """Size of a case: requests, and max new tokens of each; slots of a too small pool."""

    num_requests: int
    max_new_tokens: int
    tiny_pool: int


@dataclass(frozen=True)
class Outcome:
    """Result of a case: requests that differ (rid: how), and counts of speculation and scheduler."""

    differences: dict[str, str]
    speculation: SpecStats
    retractions: int


class Matrix:
    """The checkpoints, and the answers without speculation, shared by cases."""

    def __init__(self, folder: Path, scale: Scale, seed: int) -> None:
        self._folder, self._scale, self._seed = folder, scale, seed
        self._checkpoints: dict[str, Path] = {}
        self._expected: dict[tuple[str, bool], dict[str, Answer]] = {}

    def run(self, case: Case) -> Outcome:
        """Runs a case."""
        script = self._script(case["requests"], case["shared"])
        expected = self._without(case["requests"], case["shared"], script)
        rng = random.Random(repr(sorted(case.items())))
        script = [dataclasses.replace(item, logprob=case["logprobs"] and i % 3 > 0) for i, item in enumerate(script)]
        for item in rng.sample(script, len(script) // 3) if case["aborts"] else ():
            item.aborted_at = item.arrives + rng.randint(1, 20)
        engine = self._engine(self._target(case), **self._flags(case))
        try:
            found = engine.run(script, overlap=case["overlap"], **self._limits(case))
            speculation = engine.scheduler.stats().speculation
        finally:
            engine.close()
        assert speculation is not None
        differences = {item.rid: _difference(item, found[item.rid], expected[item.rid]) for item in script}
        retractions = sum(answer.retractions for answer in found.values())
        return Outcome({rid: text for rid, text in differences.items() if text}, speculation, retractions)

    # -- engines

    def _checkpoint(self, kind: str, num_mtp_layers: int = 0) -> Path:
        name = f"{kind}-{num_mtp_layers}"
        if name not in self._checkpoints:
            path = self._folder / name
            self._checkpoints[name] = agreeing_checkpoint(kind, path, self._seed, num_mtp_layers=num_mtp_layers)
        return self._checkpoints[name]

    def _target(self, case: Case) -> Path:
        drafter = case["drafter"]
        return self._checkpoint("deepseek_v3", int(drafter[-1]) if drafter.startswith("nextn") else 1)

    def _engine(self, path: Path, **flags: Any) -> InProcessEngine:
        slots = 16 * (self._scale.num_requests * (self._scale.max_new_tokens + 140) // 16)
        limits = {"dtype": "float32", "page_size": 16, "max_total_tokens": slots, "max_running_requests": 16}
        return InProcessEngine(path, self._folder / "board", cpu_threads=1, **limits, **flags)

    def _flags(self, case: Case) -> dict[str, Any]:
        drafter, depth, topk = case["drafter"], case["depth"], case["topk"]
        flags: dict[str, Any] = {"speculative_num_steps": depth}
        if depth != "auto" and drafter != "ngram":
            every = 1 + topk + (depth - 1) * topk**2 if topk > 1 else depth + 1
            nodes = every if case["nodes"] == "all" else max(2, every // 2)
            flags |= {"speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes}
        if drafter == "ngram":
            return flags | {"speculative_algorithm": "NGRAM"}
        if drafter.startswith("nextn"):
            return flags | {"speculative_algorithm": "NEXTN"}
        kind = "deepseek_v2" if drafter == "deepseek" else drafter
        path = str(self._checkpoint(kind))
        return flags | {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": path}

    def _limits(self, case: Case) -> dict[str, Any]:
        limits: dict[str, Any] = {
            "disable_radix_cache": not case["radix"],
            "chunked_prefill_size": case["chunk"],
            "page_size": case["page"],
            "enable_mixed_chunk": case["mixed"],
        }
        if case["pool"] == "tiny":
            limits |= {"num_slots": self._scale.tiny_pool, "retract_decode_steps": 1}
            limits |= {"schedule_conservativeness": 0.0, "clip_max_new_tokens": 2}  # admits far too many requests
        return limits

    # -- requests

    def _without(self, requests: str, shared: bool, script: list[Scripted]) -> dict[str, Answer]:
        if (requests, shared) not in self._expected:
            engine = self._engine(self._checkpoint("deepseek_v3", 1))
            try:
                self._expected[requests, shared] = engine.run(
                    [dataclasses.replace(item, logprob=True) for item in script]
                )
            finally:
                engine.close()
        return self._expected[requests, shared]

    def _script(self, requests: str, shared: bool) -> list[Scripted]:
        rng = random.Random(f"{self._seed} {requests} {shared}")
        prefix = [rng.randrange(ORDINARY) for _ in range(rng.choice([33, 40]))]
        script = []
        for i in range(self._scale.num_requests):
            own = [rng.randrange(ORDINARY) for _ in range(rng.randint(1, 24))]
            own += own[: rng.randint(0, 12)]  # a repetition for n-gram drafts
            most = self._scale.max_new_tokens
            max_new_tokens = rng.randint(most // 2 if i % 3 else 1, most)
            sampling: dict[str, Any] = {"temperature": 0.0}
            if requests != "greedy" and i % 2:
                sampling = {"temperature": 0.9, "top_p": rng.choice([1.0, 0.9]), "top_k": rng.choice([-1, 20])}
            if requests == "processors" and i % 5:
                sampling |= _wish(rng, max_new_tokens)
            script.append(
                Scripted(
                    rid=f"r{i}-",
                    prompt_ids=prefix[: rng.randint(0, len(prefix))] + own if shared and i % 4 else own,
                    max_new_tokens=max_new_tokens,
                    arrives=rng.randint(0, self._scale.num_requests // 2),
                    sampling=sampling,
                    seed=rng.getrandbits(40),
                )
            )
        return script


def _wish(rng: random.Random, max_new_tokens: int) -> dict[str, Any]:
    stop = rng.sample(range(VOCAB_SIZE), 20)
    processors: list[dict[str, Any]] = [
        {"frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"repetition_penalty": 1.4, "logit_bias": {str(rng.randrange(VOCAB_SIZE)): 4.0}},
        {"stop_token_ids": stop},
        {"stop_token_ids": stop, "min_new_tokens": rng.randint(1, max_new_tokens)},
        {"ignore_eos": True, "frequency_penalty": -0.5},
    ]
    return rng.choice(processors)


def _difference(item: Scripted, found: Answer, expected: Answer) -> str:
    """The difference of an answer from the expected one (of an aborted request: its beginning); empty if equal."""
    tokens, logprobs = expected.token_ids, expected.logprobs
    if item.aborted_at is not None and found.finish is not None and found.finish["type"] == "abort":
        tokens = tokens[: len(found.token_ids)]
    elif found.finish != expected.finish:
        return f"ended with {found.finish}, not {expected.finish}"
    if found.token_ids != tokens:
        place = sum(takewhile(bool, (a == b for a, b in zip(found.token_ids, tokens))))
        return f"token {place} of {len(tokens)}: {found.token_ids[place : place + 4]}, not {tokens[place : place + 4]}"
    if not item.logprob:
        return ""
    if len(found.logprobs) != len(tokens):
        return f"{len(found.logprobs)} log-probabilities for {len(tokens)} tokens"
    worst = max((abs(a[1] - b[1]) for a, b in zip(found.logprobs, logprobs)), default=0.0)
    same = all(a[0] == b[0] for a, b in zip(found.logprobs, logprobs))
    return "" if same and worst < LOGPROB_TOLERANCE else f"log-probabilities differ by {worst:.2g}"
