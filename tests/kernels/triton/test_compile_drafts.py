"""``moe-engine compile`` of launches with drafts: the forwards of MTP layers, draft heads and draft models."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_suite.launched import Launch, recorded
from moe_engine.cli.compile_kernels.exercise import exercise
from moe_engine.cli.compile_kernels.other_rows import build_triton
from moe_engine.config.args import EngineArgs
from moe_engine.kernels.warmup_sizes import StepSize
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.tuning.hardware.table import find_gpu
from tests.models.checkpoints import make_checkpoint
from tests.models.v4_dspark import make_dspark
from tests.speculation.block_heads import BlockForm, ReferenceBlockHead
from tests.speculation.eagle_heads import Form, ReferenceHead, Target

pytest.importorskip("triton", reason="needs triton")
SIZES = [StepSize(2, 3, 20), StepSize(0, 1, 0, 9), StepSize(3, 1, 20)]
HEADS = {"EAGLE3": Form(), "EAGLE3 of its own tokens": Form(num_tokens=40), "EAGLE": Form(eagle3=False)}
BLOCKS = {"DFLASH": BlockForm(), "DSPARK": BlockForm(markov="rnn", num_tokens=40)}
ATTENTION = ("latent_kernel", "paged_kernel")


def launched(config: ResolvedConfig) -> list[Launch]:
    plan = config.kernels.draft
    drafting = None if plan is None else build_triton(plan.choices)
    with recorded() as found:
        assert list(exercise(config, build_triton(config.kernels.model.choices), SIZES, drafting)) == SIZES
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_checkpoint(
        "deepseek_v3", folder / "model", random.randrange(1000), num_hidden_layers=4, num_nextn_predict_layers=1
    )


@pytest.mark.parametrize("way", ["NEXTN", *HEADS, "STANDALONE"])
def test_forwards_of_the_drafter_are_launched(path: Path, tmp_path: Path, way: str) -> None:
    flags: dict[str, Any] = {}
    if way in HEADS:
        head = ReferenceHead(HEADS[way], Target(path), random.randrange(1000)).write(tmp_path / "head")
        flags |= {"speculative_draft_model_path": str(head), "load_format": "auto"}
    elif way == "STANDALONE":
        flags["speculative_draft_model_path"] = str(path)
    check(path, speculative_algorithm=way.partition(" ")[0], **flags)


@pytest.mark.parametrize("way", BLOCKS)
def test_forwards_of_heads_that_fill_in_blocks_are_launched(tmp_path: Path, way: str) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model", random.randrange(1000), num_hidden_layers=4)
    head = ReferenceBlockHead(BLOCKS[way], Target(path), random.randrange(1000)).write(tmp_path / "head")
    found = check(path, speculative_algorithm=way, speculative_draft_model_path=str(head))
    trees = [getattr(launch.arguments, "TREE", False) for launch in found if launch.kernel == "paged_kernel"]
    assert any(trees) and not all(trees), "the tokens of a block see each other"


def test_forwards_of_own_layers_that_fill_in_blocks_are_launched(tmp_path: Path) -> None:
    path = make_dspark(tmp_path / "model", random.randrange(1000))
    check(path, speculative_algorithm="DSPARK", page_size=None)


def check(path: Path, **flags: Any) -> list[Launch]:
    """The drafter launches attention, in addition to that of the model. Returns all launches."""
    flags = {
        "speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3,
        "context_length": 64, "chunked_prefill_size": 16, "load_format": "dummy", **flags,
    }  # fmt: skip
    args = EngineArgs.from_kwargs(
        model_path=str(path), device="cuda", dtype="bfloat16", max_running_requests=4, **flags
    )
    config = prepare(args, find_gpu("h200").machine())
    assert config.speculation is not None
    of_model, both = launched(replace(config, speculation=None)), launched(config)
    attention = [sum(launch.kernel in ATTENTION for launch in found) for found in (of_model, both)]
    assert len(both) > len(of_model) and attention[1] > attention[0]
    return both
