"""Measured memory of sampling equals the ledger's; steps with more rows run several passes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_engine.config.args import EngineArgs
from moe_engine.kernels.sampling import scratch
from moe_engine.models import step_memory
from moe_engine.models.config_file import load_model_config
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.parallel.topology import Topology
from moe_engine.planning.resolve import resolve
from moe_engine.types import LogprobSpec, NewRow, SamplingParams
from moe_engine.worker.batch.request_rows import PromptLogprobs, RequestRows
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.logits_passes import LogitsPasses
from moe_engine.worker.sampling.logprobs import prompt_logprobs
from moe_engine.worker.sampling.sampler import SampledRows, Sampler
from moe_engine.worker.step_sampling import StepSampling
from tests.config.conftest import SMALL, machine
from tests.memory_meter import MemoryMeter
from tests.models.published import V3

VOCAB, RUNNING, DRAFTS = 32000, 60, 3
HIDDEN = 8
EDITS: dict[str, Any] = {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": ((5, 2.0),)}
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, **EDITS),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, **EDITS),
    "top_k": SamplingParams(temperature=0.8, top_k=500, top_p=0.9, **EDITS),
    "whole": SamplingParams(temperature=0.8, min_p=0.01, **EDITS),
}


def test_the_meter_counts_live_tensors() -> None:
    with MemoryMeter() as meter:
        a = torch.zeros(1000)
        view = a[:10]
        b = a + 1
        assert (meter.live, meter.peak, meter.largest, meter.calls) == (8000, 8000, 4000, 3)
        del a
        assert meter.live == 8000
        del view
        b.add_(1)
        assert (meter.live, meter.peak) == (4000, 8000)
    assert b.sum() == 2000


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Ledger of a launch with these running requests and drafts: rows of logits, and bytes of the ledger row."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({**SMALL, "vocab_size": VOCAB}))
    flags = {"speculative_algorithm": "NGRAM", "speculative_num_steps": DRAFTS, "speculative_eagle_topk": 1}
    args = EngineArgs.from_kwargs(
        max_running_requests=RUNNING, speculative_num_draft_tokens=DRAFTS + 1, dtype="bfloat16", **flags
    )
    return resolve(args, load_model_config(folder), machine(), model_path=str(folder)).ledger


def _bytes(ledger: Any, name: str) -> int:
    return {row.name: row.num_bytes for row in ledger.rows}[name]


def _bfloat16_head(hidden: Tensor, sizes: object = None) -> Tensor:
    """Logits as from a bfloat16 LM head."""
    return (hidden.bfloat16() @ torch.ones(HIDDEN, VOCAB, dtype=torch.bfloat16)).float()


def _sampling(rows_at_once: int, sampling: SamplingParams, spec: LogprobSpec | None) -> tuple[StepSampling, Sampler]:
    stream = DeviceStream("cpu")
    rows = RequestRows(RUNNING, 64, VOCAB, stream)
    rows.keep_tokens(RUNNING * 4 + 1)
    for row in range(RUNNING):
        slots = list(range(1 + 4 * row, 5 + 4 * row))
        rows.apply([], [NewRow(row, "r", [row, 1, 2, 1, 5], 2, slots, sampling, row, frozenset(), logprobs=spec)], [])
    sampler = Sampler(rows.sampling, stream, None, LogitsPasses(rows_at_once))
    return StepSampling(rows, sampler, stream), sampler


def _nodes() -> SampledRows:
    """Rows of every running request with its drafts."""
    rows = np.repeat(np.arange(RUNNING), DRAFTS + 1)
    return SampledRows(rows, np.full(len(rows), 4), torch.from_numpy(rows))


def test_the_ledger_holds_one_pass(ledger: Any) -> None:
    """Three float32 copies of the logits of one pass, and a constant."""
    most = step_memory.LOGITS_AT_ONCE // VOCAB
    assert most > RUNNING * (DRAFTS + 1) and ledger.logits_rows == RUNNING * (DRAFTS + 1)
    constant = max(step_memory.EDIT_BYTES, scratch.HOST_SCRATCH_BYTES)
    assert _bytes(ledger, "logits and sampling") == ledger.logits_rows * VOCAB * 3 * 4 + constant


@pytest.mark.each_value
@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("rows_at_once", [100, RUNNING * (DRAFTS + 1)])
def test_measured_peak(ledger: Any, kind: str, logprobs: bool, below: bool, rows_at_once: int) -> None:
    """For any sampling parameters and number of rows, a step takes at most the ledger's memory of a pass. For greedy
    rows with edited logits and log-probabilities the ledger's bytes per row are exact."""
    spec = LogprobSpec(None, 20, (3, 4)) if logprobs else None
    sampling, sampler = _sampling(rows_at_once, SAMPLINGS[kind], spec)
    nodes = _nodes()
    held = dataclasses.replace(ledger, logits_rows=rows_at_once)
    allowed = step_memory.sampling_bytes(VOCAB, held.logits_rows, scratch.HOST_SCRATCH_BYTES, 64)
    if rows_at_once == ledger.logits_rows:
        assert allowed == _bytes(ledger, "logits and sampling")
    drafts = torch.randint(-1, VOCAB, (len(nodes.rows), 1)) if below else None
    hidden = torch.zeros(len(nodes.rows), HIDDEN)
    with torch.inference_mode(), MemoryMeter() as meter:
        drawn = sampling.run(lambda work: sampler.passes.over(_bfloat16_head, hidden, None, work), nodes, below=drafts)
    assert (drawn.tokens >= 0).all() and len(drawn.tokens) == len(nodes.rows)
    assert meter.peak <= allowed
    share = rows_at_once * VOCAB * step_memory.LOGIT_BYTES
    if kind == "greedy" and logprobs and not below:
        assert share <= meter.peak <= 1.03 * share


def test_prompt_logprobs_and_drafting_use_the_same_limit(ledger: Any) -> None:
    rows_at_once = 100
    allowed = rows_at_once * VOCAB * step_memory.LOGIT_BYTES
    prompt = torch.randint(VOCAB, (700,)).tolist()
    wanted = PromptLogprobs(prompt, LogprobSpec(0, 5), 0)
    hidden = torch.zeros(700, HIDDEN)
    with torch.inference_mode(), MemoryMeter() as meter:
        found = prompt_logprobs(0, wanted, 0, hidden, _bfloat16_head, rows_at_once, VOCAB, DeviceStream("cpu"))
        assert found is not None and found.take().num_tokens == 700
    assert rows_at_once * VOCAB * 8 <= meter.peak <= allowed
    _, sampler = _sampling(rows_at_once, SamplingParams(temperature=0.0), None)
    nodes = _nodes()
    with torch.inference_mode(), MemoryMeter() as meter:
        assert len(sampler.draw(_bfloat16_head, torch.zeros(len(nodes.rows), HIDDEN), nodes)) == len(nodes.rows)
    assert rows_at_once * VOCAB * 6 <= meter.peak <= allowed


def test_drafts_do_not_take_memory_from_kv(tmp_path: Path) -> None:
    """2,048 requests of V3 with 3 drafts each would be 14.8 GB of logits."""
    (tmp_path / "config.json").write_text(json.dumps(V3))
    flags = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_eagle_topk": 1}
    args = EngineArgs.from_kwargs(speculative_num_draft_tokens=4, **flags)
    config = resolve(args, load_model_config(tmp_path), machine(1300, 1400, "cuda"), model_path=str(tmp_path))
    assert config.max_running_requests == 2048
    rows = {row.name: row for row in config.ledger.rows}
    assert rows["logits and sampling"].num_bytes < 1 << 30
    assert rows["logits and sampling"].detail == "512 rows of 129280 at once, of up to 8192"


@pytest.mark.parametrize(
    ("vocab", "num_logits", "rows"),
    [(129280, 8192, 512), (129280, 300, 300), (129280, 1, 16), (320, 10**6, 1024), (1 << 22, 10**6, 64)],
)
def test_rows_at_once(vocab: int, num_logits: int, rows: int) -> None:
    assert step_memory.logits_rows(vocab, num_logits) == rows


# -- passes


@pytest.mark.parametrize("rows", [0, 1, 5, 6, 13])
def test_one_pass_if_all_rows_fit_and_every_row_once(rows: int) -> None:
    hidden, seen = torch.arange(rows)[:, None], []
    out = LogitsPasses(5).over(lambda part, sizes=None: part * 2, hidden, None, lambda part, x: seen.append(part) or x)
    assert torch.cat(out).flatten().tolist() == [2 * i for i in range(rows)]
    assert len(out) == max(1, -(-rows // 5)) and max(part.stop - part.start for part in seen) <= 5


@pytest.mark.parametrize("logits", [(0, 3, 11), (12, 1, 5), (4, 5, 5), (0, 0, 0)], ids=repr)
def test_all_attention_groups_make_the_same_passes(logits: tuple[int, ...]) -> None:
    """All groups call a shared LM head with the same sizes until the last group has its rows."""
    parallel = [ParallelContext(Topology(tp_size=3, attn_dp_size=3), group) for group in range(3)]
    calls: list[list[tuple[int, ...]]] = []
    for group, context in enumerate(parallel):
        sizes_ = StepSizes.known(context, logits, logits, False)
        own: list[tuple[int, ...]] = []

        def head(hidden: Tensor, sizes: StepSizes | None = None, own: Any = own, group: int = group) -> Tensor:
            assert sizes is not None and sizes.logits[group] == len(hidden)
            assert sizes.own_logits == slice(0, len(hidden)) and sum(sizes.logit_shares) == sum(sizes.logits)
            own.append(sizes.logits)
            return hidden

        passes, hidden = LogitsPasses(5), torch.arange(logits[group])[:, None]
        out = passes.over(head, hidden, sizes_, lambda part, x: x)
        assert torch.cat(out).flatten().tolist() == list(range(logits[group]))
        if not logits[group]:
            own_before = list(own)
            own.clear()
            passes.join(head, hidden, sizes_)
            assert own == own_before
        calls.append(own)
    assert calls[0] == calls[1] == calls[2]
    assert [sum(column) for column in zip(*calls[0])] == list(logits) and all(max(c) <= 5 for c in calls[0])
