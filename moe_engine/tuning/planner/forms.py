"""The forms of parallelism that divide a number of GPUs, and the sizes and options that may pay off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from moe_engine.tuning.costs.form import Form
from moe_engine.tuning.costs.model_facts import ModelFacts
from moe_engine.tuning.planner.candidate import Candidate

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CHUNKS = (2048, 8192)
BALANCED_FROM = 16
"""Ranks from which redundant experts are tried: fewer ranks hold enough experts to balance."""

MOST_DRAFTS = 3
"""TensorRT-LLM's optimum for DeepSeek-R1 at batch 1 (tech blog 1)."""


def forms(facts: ModelFacts, gpus: int, kept: Callable[[Form], bool]) -> Iterator[tuple[Form, int]]:
    """Forms of a replica, with the number of replicas; all GPUs are used."""
    for ranks in (size for size in range(1, gpus + 1) if gpus % size == 0 and not size & (size - 1)):
        for dp in (size for size in range(1, ranks + 1) if ranks % size == 0 and not size & (size - 1)):
            if facts.num_heads % (ranks // dp) or (1 < dp < ranks and ranks // dp > 8):
                continue
            for form in _experts(facts, ranks, dp):
                if kept(form):
                    yield form, gpus // ranks


def _experts(facts: ModelFacts, ranks: int, dp: int) -> Iterator[Form]:
    if not facts.num_experts:
        yield Form(ranks, dp)
        return
    if dp == 1:
        yield Form(ranks)
        if ranks > 1 and facts.num_experts % ranks == 0:
            yield Form(ranks, ep=ranks)
        return
    if facts.num_experts % ranks == 0:
        yield Form(ranks, dp, ranks, travels=True, dense_whole=True)
        yield Form(ranks, dp, ranks)


def variants(form: Form) -> list[Form]:
    """The form with and without two-batch overlap and redundant experts."""
    found = [form]
    if form.travels:
        found.append(replace(form, overlap=True))
    if form.travels and form.ranks >= BALANCED_FROM:
        found += [replace(variant, redundant=form.ranks) for variant in list(found)]
    return found


def depths(facts: ModelFacts) -> range:
    """MTP depths that may pay off."""
    return range(min(1, facts.mtp_layers) * MOST_DRAFTS + 1)


def options(facts: ModelFacts, form: Form, kv: Sequence[str], model_path: str, replicas: int) -> Iterator[Candidate]:
    """Everything but the number of requests."""
    for variant in variants(form):
        for dtype in kv:
            for chunk in CHUNKS:
                for drafts in depths(facts):
                    yield Candidate(variant, replicas, dtype, chunk, 1, drafts, model_path)
