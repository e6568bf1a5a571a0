"""Draft heads on several ranks: the tokens of one rank, and the acceptance of an offline count, in every form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_engine import Engine
from tests.speculation.eagle_pairs import Pair, make_pair

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(1)]

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 20}
DEPTH = 2
FLAGS: dict[str, Any] = {
    "cpu_threads": 1, "skip_tokenizer_init": True, "chunked_prefill_size": 32, "max_running_requests": 16,
    # without a step in flight the last steps are known
    "disable_overlap_schedule": True, "speculative_num_steps": DEPTH, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": DEPTH + 1,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2},
    "dp attention": {"tp_size": 2, "attn_dp_size": 2},
    "tokens that travel": {"tp_size": 2, "moe_a2a_backend": "allgather"},
    "groups of 2": {"tp_size": 4, "attn_dp_size": 2},
    "replicas": {"dp_size": 2},
}

QUICK = ("dp attention",)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair("eagle3 on mla", tmp_path_factory.mktemp("eagle"))


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[tuple[list[int], int]]:
    return expected_of(pair)


def expected_of(pair: Pair) -> list[tuple[list[int], int]]:
    """The tokens of each prompt on one rank without drafts, and the accepted drafts of the reference."""
    with Engine(
        str(pair.path), dtype="float32", max_total_tokens=2048, cpu_threads=1, skip_tokenizer_init=True
    ) as engine:
        outputs: Any = engine.generate(input_ids=pair.prompts, sampling_params=GREEDY)
    found = []
    for prompt, output in zip(pair.prompts, outputs):
        tokens = output["output_ids"]
        found.append((tokens, sum(pair.counts(prompt, tokens, DEPTH)[1])))
    return found


@pytest.mark.parametrize(
    "form", [form if form in QUICK else pytest.param(form, marks=pytest.mark.exhaustive) for form in FORMS]
)
def test_forms(pair: Pair, expected: list[tuple[list[int], int]], form: str) -> None:
    compare(pair, expected, form)


@pytest.mark.parametrize(
    "form", [form if form in QUICK else pytest.param(form, marks=pytest.mark.exhaustive) for form in FORMS]
)
def test_blocks(tmp_path: Path, form: str) -> None:
    pair = make_pair("dspark", tmp_path)
    compare(pair, expected_of(pair), form)


def compare(pair: Pair, expected: list[tuple[list[int], int]], form: str) -> None:
    with Engine(str(pair.path), **pair.flags(**FLAGS), **FORMS[form]) as engine:
        outputs: Any = engine.generate(input_ids=pair.prompts, sampling_params=GREEDY)
    tokens = [output["output_ids"] for output in outputs]
    accepted = [output["meta_info"]["spec_num_correct_drafts"] for output in outputs]
    assert tokens == [want for want, _ in expected]
    assert accepted == [want for _, want in expected] and sum(accepted) > 0
