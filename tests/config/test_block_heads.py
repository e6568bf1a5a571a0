"""DFlash and DSpark heads before a weight is read: their fields, and heads that are not supported."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import MoeEngineError
from moe_engine.executor.make_worker import worker_options
from moe_engine.models.config_sections.block import BlockConfig
from moe_engine.planning.memory.ledger import DRAFT_WEIGHTS
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolve import ResolvedConfig
from moe_engine.worker.startup.speculation_setup import draft_bytes
from moe_engine.worker.worker import Worker
from tests.models.checkpoints import make_checkpoint
from tests.speculation.block_heads import BlockForm, ReferenceBlockHead
from tests.speculation.eagle_heads import Target

DFLASH = BlockForm(size=6)
DSPARK = BlockForm(size=4, markov="rnn", num_layers=3, tapped=(-1, 0, 2))
SPECULATORS = BlockForm(size=4, num_tokens=100, speculators=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("target"), num_hidden_layers=8)


@pytest.fixture(scope="module")
def loaded(target: Path) -> Target:
    return Target(target)


def write(loaded: Target, folder: Path, form: BlockForm = DFLASH, **fields: Any) -> Path:
    return ReferenceBlockHead(form, loaded, random.randrange(1000)).write(folder, **fields)


def start(target: Path, head: Path, algorithm: str = "DFLASH", **flags: Any) -> ResolvedConfig:
    more = {"dtype": "float32", "max_total_tokens": 512, "max_running_requests": 4, "device": "cpu"}
    names = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(head), "cpu_threads": 1}
    return prepare(EngineArgs.from_kwargs(model_path=str(target), **more, **names, **flags))


def test_fields_and_lengths(target: Path, loaded: Target, tmp_path: Path) -> None:
    config = start(target, write(loaded, tmp_path))
    head, speculation = config.draft_head, config.speculation
    assert head is not None and head.block == BlockConfig(6, 7, False, skips_first=True) and head.tapped == (1, 3)
    assert speculation is not None and (speculation.method, speculation.num_steps, speculation.topk) == ("block", 5, 1)
    for flags, steps in (
        ({"speculative_num_steps": 3}, 3),
        ({"speculative_num_draft_tokens": 3}, 2),
        ({"speculative_num_steps": "auto"}, 5),
        ({"speculative_num_steps": "auto", "speculative_num_draft_tokens": 4}, 3),
    ):
        found = start(target, tmp_path, **flags).speculation
        assert found is not None and found.num_steps == steps
    spaced = {"dflash_config": {"mask_token_id": 7}, "block_size": 3}
    config = start(target, write(loaded, tmp_path, BlockForm(num_layers=3, tapped=(1, 3, 5)), **spaced))
    assert config.draft_head is not None and config.draft_head.tapped == (2, 4, 6)
    section = {"mask_token_id": 9, "target_layer_ids": list(DSPARK.tapped), "projector_type": "dspark"}
    other = {"architectures": ["DSparkDraftModel"], "dflash_config": section, "attention_mode": "gqa"}
    config = start(target, write(loaded, tmp_path, DSPARK, **other), "DSPARK")
    assert config.draft_head is not None and config.draft_head.block is not None
    assert (config.draft_head.block.mask_id, config.draft_head.block.markov_rank) == (9, 24)
    config = start(target, write(loaded, tmp_path, DSPARK), "DSPARK")
    assert config.draft_head is not None
    assert config.draft_head.block == BlockConfig(4, 7, True, False, markov_rank=24, markov_head="rnn")
    assert config.draft_head.tapped == (0, 1, 3) and config.speculation is not None
    assert config.speculation.num_steps == 4


@pytest.mark.parametrize(
    ("form", "drafts"),
    [
        (SPECULATORS, 3),
        (BlockForm(size=4, anchor=True, speculators=True), 4),
        (BlockForm(size=4, markov="vanilla", speculators=True), 4),
        (BlockForm(size=4, markov="vanilla", speculators=True, anchor=False, num_tokens=60), 3),
    ],
    ids=["dflash", "dflash from the anchor", "dspark", "dspark after the anchor"],
)
def test_fields_of_the_speculators_library(
    target: Path, loaded: Target, tmp_path: Path, form: BlockForm, drafts: int
) -> None:
    config = start(target, write(loaded, tmp_path, form), form.algorithm)
    head, speculation = config.draft_head, config.speculation
    assert head is not None and head.block is not None and speculation is not None
    kind = {"DFLASH": "DFlash head", "DSPARK": "DSpark head"}[form.algorithm]
    assert (head.kind, speculation.num_steps, head.tapped) == (kind, drafts, (1, 3))
    assert (head.own_head, head.has_ids) == (form.num_tokens, form.num_tokens > 0)


@pytest.mark.parametrize("form", [DFLASH, DSPARK, SPECULATORS], ids=["dflash", "dspark", "speculators"])
def test_the_ledger_counts_what_is_held(target: Path, loaded: Target, tmp_path: Path, form: BlockForm) -> None:
    config = start(target, write(loaded, tmp_path, form), form.algorithm, context_length=64, skip_tokenizer_init=True)
    counted = {row.name: row.num_bytes for row in config.ledger.rows}[DRAFT_WEIGHTS]
    worker = Worker.create(worker_options(config))
    held = draft_bytes(worker.runner)
    worker.close()
    assert held == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(
    ("form", "fields", "flags", "words"),
    [
        (DFLASH, {"model_type": "gemma4"}, {}, "model_type gemma4: a head that fills in blocks must have layers of"),
        (DFLASH, {"draft_vocab_size": 100}, {}, "draft_vocab_size is 100, and the head has no lm_head.weight"),
        (DFLASH, {"speculators_model_type": "dspark"}, {}, "transformer_layer_config must be an object, found None"),
        (SPECULATORS, {"speculators_model_type": "peagle"}, {}, "speculators_model_type peagle: heads in the format"),
        (SPECULATORS, {"transformer_layer_config": {"model_type": "gemma3"}}, {}, "model_type gemma3: the layers of a"),
        (SPECULATORS, {"aux_hidden_state_layer_ids": None}, {}, "aux_hidden_state_layer_ids must be a list of layers"),
        (SPECULATORS, {"projector_type": "domino"}, {}, "projector_type domino: not supported"),
        (DFLASH, {"block_size": 1}, {}, "block_size 1: a block has at least 2 tokens"),
        (DFLASH, {"block_size": None}, {}, "block_size must be a whole number, found None"),
        (DFLASH, {"dflash_config": {"mask_token_id": 9999, "target_layer_ids": [0]}}, {}, "mask_token_id 9999"),
        (DFLASH, {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 8]}}, {}, "belongs to another model"),
        (DFLASH, {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [3]}}, {}, "fc.weight"),
        (DFLASH, {"hidden_size": 32}, {}, "another model: its hidden_size is 32"),
        (DFLASH, {}, {"speculative_eagle_topk": 2}, "--speculative-eagle-topk 2: a DFlash head drafts chains; use 1"),
        (DFLASH, {}, {"speculative_num_steps": 6}, "blocks of 6 tokens of the DFlash head have 5 drafts"),
        (DFLASH, {}, {"speculative_algorithm": "EAGLE3"}, "--speculative-algorithm is EAGLE3; use DFLASH"),
        (DSPARK, {"markov_head_type": "conv"}, {"speculative_algorithm": "DSPARK"}, "markov_head_type conv"),
        (DSPARK, {}, {}, "a DSpark head, and --speculative-algorithm is DFLASH; use DSPARK"),
    ],
)  # fmt: skip
def test_refusals(
    target: Path,
    loaded: Target,
    tmp_path: Path,
    form: BlockForm,
    fields: dict[str, Any],
    flags: dict[str, Any],
    words: str,
) -> None:
    head = write(loaded, tmp_path, form, **fields)
    with pytest.raises(MoeEngineError, match=re.escape(words)):
        start(target, head, **{"algorithm": flags.pop("speculative_algorithm", "DFLASH"), **flags})


def test_a_head_is_needed(target: Path) -> None:
    more: dict[str, Any] = {"model_path": str(target), "device": "cpu", "speculative_algorithm": "DSPARK"}
    with pytest.raises(MoeEngineError, match=r"needs a DSpark head for .* in --speculative-draft-model-path"):
        prepare(EngineArgs.from_kwargs(**more))
