"""Engines on a simulated GPU: the answers of the CPU, replayed decodes, no waits in the thread that launches steps."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moe_engine.kernels.attention.reference import TorchMLA
from moe_engine.kernels.attention.triton.attention import TritonGQA, TritonMLA
from moe_engine.kernels.attention.vendors.fa3 import FA3GQA, FA3MLA
from moe_engine.kernels.attention.vendors.flashinfer_gqa import FlashInferGQA
from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA
from moe_engine.kernels.attention.vendors.flashmla import FlashMLA
from moe_engine.kernels.attention.vendors.trtllm_mla import TrtllmMLA
from moe_engine.kernels.delta import triton_delta
from moe_engine.kernels.experts.triton_experts import TritonExperts
from moe_engine.kernels.kv_format.formats import E4M3_TENSOR
from moe_engine.planning.model import sparse_attention
from moe_engine.types import StepPlan
from moe_engine.types.step_settings import GraphSettings
from moe_engine.worker.sampling.logits_passes import LogitsPasses
from moe_engine.worker.startup import build_runner
from moe_engine.worker.startup.graph_setup import capture_graphs
from tests.engine.harness import Answer, InProcessEngine, Scripted
from tests.examples import FACTOR
from tests.kernels.vendors import fa3_emulator, flash_mla_emulator, flashinfer_emulator
from tests.models.checkpoints import make_checkpoint
from tests.models.kimi_k3 import make_k3
from tests.models.latent_scales import add_latent_scales
from tests.models.mxfp4 import mxfp4_copy
from tests.simulated_cuda import kernels, libraries, quick_start, specializations, streams
from tests.speculation.agreeing import agreeing_checkpoint

pytestmark = pytest.mark.drawn(4)

LIMITS: dict[str, Any] = {
    "max_total_tokens": 128, "context_length": 16, "max_running_requests": 2, "chunked_prefill_size": 8,
}  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0.0}
FEW: dict[str, Any] = dict.fromkeys(("linear_backend", "ops_backend", "sampling_backend"), "torch")
"""Backends without interpreted kernels, with the same host part."""
NONE = FEW | {"moe_runner_backend": "torch", "attention_backend": "torch"}
CHAIN: dict[str, Any] = {
    "speculative_algorithm": "NEXTN", "speculative_num_steps": 1, "speculative_num_draft_tokens": 2,
    "speculative_eagle_topk": 1,
}  # fmt: skip
TREE = CHAIN | {"speculative_num_steps": 2, "speculative_num_draft_tokens": 4, "speculative_eagle_topk": 2}
EDITS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logit_bias": {"5": 3.0, "7": -100}},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.2, "sampling_seed": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_new_tokens": 3},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.05, "sampling_seed": 5},
]


@dataclass
class Step:
    plan: StepPlan
    cuda_graph: bool
    waits: list[str]
    """Name of the thread that launches steps."""


@dataclass
class Run:
    answers: dict[str, Answer]
    steps: list[Step]
    num_graphs: int
    late: list[str]
    """Kernels that a GPU would have compiled after READY."""

    @property
    def waits(self) -> list[str]:
        return [wait for step in self.steps for wait in step.waits]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "model"
    return agreeing_checkpoint("deepseek_v3", path, 5, num_hidden_layers=2, num_mtp_layers=1)


def sometimes_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a third of the runs the engine computes steps of every size before READY: more than half of all launches."""
    if FACTOR > 1 or random.randrange(3) == 0:
        quick_start.start_whole(monkeypatch)


def script(samplings: list[dict[str, Any]], logprob: bool | None = None) -> list[Scripted]:
    """The prompts share a prefix: later requests find its pages in the radix cache. `logprob` None: in most runs."""
    if logprob is None:
        logprob = random.randrange(4) > 0  # other kernels choose tokens without them
    more = {"top_logprobs": 2, "token_ids_logprob": [3]} if logprob else {}
    return [
        Scripted(f"r{i}", [*range(5, 11), 20 + i, 21], 4, 4 * i, sampling=sampling, logprob=logprob, more=more)
        for i, sampling in enumerate(samplings)
    ]


def watched(engine: InProcessEngine, requests: list[Scripted]) -> Run:
    """A run of the engine. Waits inside the torch rows of kernels, which are not for GPUs, are excluded."""
    runner, steps = engine.worker.runner, []
    launch = runner.launch

    def noted(plan: StepPlan) -> Any:
        first = len(streams.waits)
        pending: Any = launch(plan)
        own = [wait for wait in streams.waits[first:] if wait.thread == threading.current_thread().name]
        waits = [f"{wait.what}: {wait.where}" for wait in own]
        foreign = ("reference.py", "dispatch/local.py", "flashinfer_emulator.py")
        waits = [wait for wait in waits if not any(part in wait for part in foreign)]
        steps.append(Step(plan, pending.cuda_graph, waits))
        return pending

    runner.launch = noted  # type: ignore[method-assign]
    try:
        answers = engine.run(requests)
    finally:
        runner.launch = launch  # type: ignore[method-assign]
    return Run(answers, steps, engine.worker.info.num_graphs, list(specializations.late))


def serve(path: Path, folder: Path, requests: list[Scripted], **flags: Any) -> Run:
    engine = InProcessEngine(path, folder / "board", dtype="float32", **{**LIMITS, **flags})
    try:
        return watched(engine, requests)
    finally:
        engine.close()


def check_answers(found: dict[str, Answer], expected: dict[str, Answer], tolerance: float = 2e-5) -> None:
    for rid, want in expected.items():
        got = found[rid]
        assert (got.token_ids, got.finish, got.cached_tokens) == (want.token_ids, want.finish, want.cached_tokens), rid
        got_logprobs, wanted = ([entry[1] for entry in answer.logprobs] for answer in (got, want))
        assert got_logprobs == pytest.approx(wanted, abs=tolerance), rid


def compared(path: Path, folder: Path, requests: list[Scripted], both: dict[str, Any], **flags: Any) -> Run:
    """An engine on the device; checks that its answers are those of an engine on the CPU, and if it has warmed up for
    all sizes, that no request waits for a compilation.

    Args:
        both: flags of both engines. flags: of the engine on the device.
    """
    expected = serve(path, folder, requests, device="cpu", **both)
    found = serve(path, folder, requests, device="cuda", **both, **flags)
    check_answers(found.answers, expected.answers)
    assert any(answer.cached_tokens for answer in found.answers.values())
    if quick_start.starts_whole():
        assert found.late == []
    return found


def test_own_kernels_captured(checkpoint: Path, tmp_path: Path) -> None:
    """Prompts in chunks, replayed decodes, greedy and sampled rows, without waits."""
    requests = script([GREEDY, GREEDY | {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "sampling_seed": 2}])
    found = compared(checkpoint, tmp_path, requests, {}, cuda_graph_max_bs=2, chunked_prefill_size=4)
    assert found.num_graphs == 2 and found.waits == []
    assert any(step.cuda_graph for step in found.steps)
    launched = set(kernels.launches)
    assert launched >= {"latent_kernel", "expanded_kernel", "gate_up_kernel", "norm_route_kernel", "greedy_kernel"}


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_experts_on_a_shortcut_are_captured(drafts: bool, tmp_path: Path) -> None:
    """LongCat-Flash: zero experts, and drafts of its dense MTP layer: the tokens of the CPU, replayed decodes."""
    sizes = {"n_routed_experts": 4, "zero_expert_num": 3, "moe_topk": 3}
    path = agreeing_checkpoint("longcat_flash", tmp_path / "model", 5, num_hidden_layers=2, num_mtp_layers=1, **sizes)
    requests, flags = script([GREEDY, GREEDY]), {**FEW, "ops_backend": "triton"}
    more = {"cuda_graph_max_bs": 2, "chunked_prefill_size": 4}
    found = compared(path, tmp_path, requests, CHAIN if drafts else {}, **more, **flags)
    assert found.num_graphs and any(step.cuda_graph for step in found.steps)
    assert drafts or found.waits == []
    assert set(kernels.launches) >= {"add_input_kernel", "router_select_kernel", "latent_kernel"}


def test_drafts_within_windows_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 3.7: steps with drafts of two MTP layers with windows and heads of their own are replayed without waits;
    their KV is in the pool of windows. Drafts beyond the window, and beyond the layers."""
    quick_start.start_whole(monkeypatch)
    sizes = {"moe_num_experts": 4, "moe_top_k": 2, "sliding_window": 5}
    path = agreeing_checkpoint("step3p7", tmp_path / "model", random.randrange(1000), num_mtp_layers=2, **sizes)
    both = CHAIN | {"speculative_num_steps": 3, "speculative_num_draft_tokens": 4, "context_length": 24}
    requests = [replace(request, max_new_tokens=10) for request in script([GREEDY, GREEDY])]
    flags = FEW | {"sampling_backend": "triton"}
    found = compared(path, tmp_path, requests, both, cuda_graph_bs_decode="2", **flags)
    replayed = [step for step in found.steps if step.cuda_graph]
    assert found.num_graphs and any(step.plan.speculation and step.plan.speculation.depth == 3 for step in replayed)
    assert [wait for step in replayed for wait in step.waits] == []
    assert set(kernels.launches) >= {"chain_inputs_kernel", "chain_runs_kernel", "paged_kernel"}


def test_e4m3_latents_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled cache rows and attention in Triton: the tokens of the CPU, whose last bits may round to another e4m3
    number."""
    sometimes_warm(monkeypatch)
    path = agreeing_checkpoint("deepseek_v3", tmp_path / "model", 5, num_hidden_layers=1, first_k_dense_replace=1)
    add_latent_scales(path, 1)
    requests, both = script([GREEDY, GREEDY]), {"kv_cache_dtype": E4M3_TENSOR}
    expected = serve(path, tmp_path, requests, device="cpu", **both)
    more = {"cuda_graph_max_bs": 2, "chunked_prefill_size": 4, **FEW, "ops_backend": "triton"}
    found = serve(path, tmp_path, requests, device="cuda", **both, **more)
    check_answers(found.answers, expected.answers, tolerance=0.02)
    assert any(answer.cached_tokens for answer in found.answers.values())
    assert found.num_graphs == 2 and found.waits == []
    assert set(kernels.launches) >= {"latent_kernel", "gather_kernel", "absorb_kernel"}


def test_sparse_decodes_are_captured(tmp_path: Path) -> None:
    """DeepSeek V3.2 in this project's kernels, with contexts within the top-k and beyond it, and prompts in chunks: the
    tokens of the CPU, replayed decodes, no waits. No step before READY exceeds the top-k."""
    fields = {"index_head_dim": 16, "index_topk": 8, "first_k_dense_replace": 2}
    path = agreeing_checkpoint("deepseek_v32", tmp_path / "model", 5, num_hidden_layers=2, **fields)
    short = Scripted("short", [9, 5, 7], 4, 0, sampling=GREEDY, logprob=True)
    requests = [short, *script([GREEDY, GREEDY], logprob=True)]
    found = compared(path, tmp_path, requests, {}, cuda_graph_max_bs=2, chunked_prefill_size=4, **FEW)
    replayed = [step for step in found.steps if step.cuda_graph]
    assert found.num_graphs == 2 and len(replayed) > 4 and found.waits == []
    lens = {start + 1 for step in replayed for start in step.plan.starts}
    assert min(lens) <= 8 < max(lens)
    launched = set(kernels.launches)
    assert launched >= {"scores_kernel", "select_kernel", "latent_kernel"}


def test_block_sparse_decodes_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniMax-M3 in this project's kernels, with contexts within the selected blocks and beyond them: tokens and
    log-probabilities of the CPU, replayed decodes, no waits."""
    sometimes_warm(monkeypatch)
    own = {"sparse_num_index_heads": 2, "sparse_index_dim": 16, "sparse_block_size": 4, "sparse_topk_blocks": 2}
    fields = {"num_hidden_layers": 2, "moe_layer_freq": [0, 0]}
    sparse = own | {"sparse_attention_freq": [0, 1]}
    path = agreeing_checkpoint("minimax_m3", tmp_path / "model", 5, sparse_attention_config=sparse, **fields)
    short = Scripted("short", [9, 5, 7], 4, 0, sampling=GREEDY, logprob=True)
    requests = [short, *script([GREEDY, GREEDY], logprob=True)]
    more = {"cuda_graph_max_bs": 2, "chunked_prefill_size": 4, **FEW, "moe_runner_backend": "triton"}
    found = compared(path, tmp_path, requests, {}, **more)
    replayed = [step for step in found.steps if step.cuda_graph]
    assert found.num_graphs == 2 and len(replayed) > 4 and found.waits == []
    lens = {start + 1 for step in replayed for start in step.plan.starts}
    assert min(lens) <= 8 < max(lens)
    assert set(kernels.launches) >= {"block_scores_kernel", "select_blocks_kernel", "paged_kernel"}


def test_index_keys_in_fp8_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek V3.2 with the index keys of a GPU, records beside latents: the tokens of the CPU with such keys. Decodes
    beyond the top-k are replayed, prefixes are cached."""
    sometimes_warm(monkeypatch)
    monkeypatch.setattr(sparse_attention, "FP8_KEYS", {("cpu", "float32"), ("cuda", "float32")})
    fields = {"index_head_dim": 16, "index_topk": 8, "num_hidden_layers": 1, "first_k_dense_replace": 1}
    path = agreeing_checkpoint("deepseek_v32", tmp_path / "model", 5, **fields)
    requests = script([GREEDY, GREEDY])
    expected = serve(path, tmp_path, requests, device="cpu")
    more = {"cuda_graph_max_bs": 2, "chunked_prefill_size": 4, **FEW, "ops_backend": "triton"}
    found = serve(path, tmp_path, requests, device="cuda", **more)
    check_answers(found.answers, expected.answers, tolerance=0.02)
    assert any(answer.cached_tokens for answer in found.answers.values())
    replayed = [step for step in found.steps if step.cuda_graph]
    assert max(start + 1 for step in replayed for start in step.plan.starts) > 8
    assert found.num_graphs == 2 and found.waits == []
    assert set(kernels.launches) >= {"router_logits_kernel", "index_rows_kernel", "scores_kernel", "select_kernel"}


def test_experts_stay_in_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss in this project's kernels: the tokens of the CPU, replayed decodes, no expert dequantized."""
    kept: list[int] = []
    load = TritonExperts.load_codes
    monkeypatch.setattr(TritonExperts, "load_codes", lambda *args: (kept.append(args[2]), load(*args)))
    monkeypatch.setattr(TritonExperts, "load_expert", None)
    fields = {"num_local_experts": 4, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    source = agreeing_checkpoint("gpt_oss", tmp_path / "own", 5, **fields)
    path = mxfp4_copy(source, tmp_path)[0]
    found = compared(path, tmp_path, script([GREEDY, GREEDY]), {}, cuda_graph_bs_decode="2", **FEW)
    assert sorted(kept) == [0, 1, 2, 3]
    assert found.num_graphs == 1 and found.waits == []
    assert set(kernels.launches) >= {"gate_up_kernel", "down_kernel", "paged_kernel"}


DELTA: dict[str, Any] = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "num_mtp_layers": 1}


@pytest.mark.parametrize("drafts", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["plain", "drafts"])
def test_captured_steps_of_states(drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-Next: captured decodes and captured steps with drafts read and store the states of their requests by rows
    on the device. Steps with padding, prompts in chunks of the delta rule, cached prefixes."""
    sometimes_warm(monkeypatch)
    monkeypatch.setattr(triton_delta, "SHORT", 3)
    path = agreeing_checkpoint("qwen3_next", tmp_path / "model", 5, **DELTA)
    requests = [Scripted(f"r{i}", [*range(5, 11), 20, i], 3, 3 * i, sampling=GREEDY) for i in range(2)]
    flags = CHAIN | {"page_size": 1} if drafts else {}
    both = {
        "max_mamba_cache_size": 8,
        "max_running_requests": 3,
        "context_length": 24,
        "chunked_prefill_size": 4,
    } | flags
    found = compared(path, tmp_path, requests, both, cuda_graph_bs_decode="2", **FEW)
    replayed = [step for step in found.steps if step.cuda_graph]
    assert found.num_graphs and {len(step.plan.rows) for step in replayed} >= {1}
    if drafts:
        assert any(step.plan.speculation and step.plan.speculation.depth for step in replayed)
    assert [wait for step in (replayed if drafts else found.steps) for wait in step.waits] == []
    launched = set(kernels.launches)
    assert launched >= {"conv_update_kernel", "delta_kernel", "gated_norm_kernel", "system_kernel", "states_kernel"}


@pytest.mark.parametrize("form", ["plain", "drafts", pytest.param("granite", marks=pytest.mark.exhaustive)])
def test_captured_steps_of_additive_states(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nemotron-H: the same of Mamba2, beside attention without positions, experts and an MLP without gates, and mixers
    without a feed-forward after them; with drafts of an MTP layer. Granite 4: one group."""
    drafts = form == "drafts"
    sometimes_warm(monkeypatch)
    monkeypatch.setattr(triton_delta, "SHORT", 3)
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_hidden_layers": 5}
    if form == "granite":
        path = make_checkpoint("granitemoehybrid", tmp_path / "model", 5, num_local_experts=4)
    else:
        path = make_checkpoint("nemotron_h", tmp_path / "model", 5, num_mtp_layers=1, **sizes)
    requests = [Scripted(f"r{i}", [*range(5, 11), 20, i], 3, 3 * i, sampling=GREEDY) for i in range(2)]
    flags = {"max_mamba_cache_size": 8, "max_running_requests": 3, "context_length": 24, "chunked_prefill_size": 4}
    flags |= CHAIN | {"page_size": 1} if drafts else {}
    found = compared(path, tmp_path, requests, flags, cuda_graph_bs_decode="2", **FEW)
    replayed = [step for step in found.steps if step.cuda_graph]
    assert found.num_graphs and len(replayed) > 1
    assert [wait for step in (replayed if drafts else found.steps) for wait in step.waits] == []
    assert not drafts or any(step.plan.speculation and step.plan.speculation.depth for step in replayed)
    launched = set(kernels.launches)
    assert launched >= {"conv_update_kernel", "delta_kernel", "group_norm_kernel", "additive_kernel", "states_kernel"}
    assert "gate_up_kernel" in launched


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("kimi_linear", {"num_experts": 4, "num_experts_per_token": 2}),
        ("bailing_hybrid", {"num_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}),
        ("kimi_k3", {"num_experts": 4, "num_experts_per_token": 2}),
    ],
)
def test_captured_steps_of_decays_by_channel(
    kind: str, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kimi Linear: the same beside MLA, all of whose tokens have position 0. Ling: beside MLA with a gate. Kimi K3:
    with blocks of the residual, experts in a latent space and SiTU."""
    sometimes_warm(monkeypatch)
    monkeypatch.setattr(triton_delta, "SHORT", 3)
    make = make_k3 if kind == "kimi_k3" else partial(make_checkpoint, kind)
    path = make(tmp_path / "model", 5, **sizes)
    requests = [Scripted(f"r{i}", [*range(5, 11), 20, i], 3, 3 * i, sampling=GREEDY) for i in range(2)]
    flags = {"max_mamba_cache_size": 8, "max_running_requests": 3, "context_length": 24, "chunked_prefill_size": 4}
    found = compared(path, tmp_path, requests, flags, cuda_graph_bs_decode="2", **FEW)
    assert found.num_graphs and any(step.cuda_graph for step in found.steps)
    assert [wait for step in found.steps for wait in step.waits] == []
    assert set(kernels.launches) >= {"delta_kernel", "gated_norm_kernel", "system_kernel", "states_kernel"}


def check_one_wait_a_step(run: Run) -> None:
    """Steps with drafts wait once: for the true lengths of the rows. Steps of prompts alone never wait."""
    for step in run.steps:
        waits = [wait for wait in step.waits if "Event.synchronize" not in wait]  # of a library's page-locked plan
        assert all("batch/token_buffer.py" in wait for wait in waits), waits
        assert len(waits) == bool(step.plan.num_decodes), (step.plan, waits)


def test_chains_of_drafts_wait_once_a_step(checkpoint: Path, tmp_path: Path) -> None:
    """Log-probabilities and penalties of drafts are computed on the device."""
    check_one_wait_a_step(compared(checkpoint, tmp_path, script(EDITS[1:3], logprob=True), CHAIN, **NONE))


def test_trees_of_drafts(checkpoint: Path, tmp_path: Path) -> None:
    found = compared(checkpoint, tmp_path, script([GREEDY, EDITS[1]], logprob=True), TREE, **NONE)
    reads = ("batch/token_buffer.py", "speculation/tree.py", "device_stream.py:")
    assert all(any(read in wait for read in reads) for wait in found.waits), found.waits


def test_edited_logits_and_log_probabilities_never_wait(checkpoint: Path, tmp_path: Path) -> None:
    """Biases, penalties, minimal lengths, log-probabilities, every kind of sampling."""
    found = compared(checkpoint, tmp_path, script(EDITS, logprob=True), {}, **NONE)
    assert found.waits == []


# -- attention of vendor libraries

DRAFTS = 2
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}
PADDED, EXACT = GraphSettings((1, 3)), GraphSettings((1, 2), pad=False)
ALL_ROWS = 1 << 30
LIBRARIES: dict[str, tuple[str, Callable[[], Any], int, GraphSettings, int]] = {
    "flashinfer": ("mla", lambda: FlashInferMLA(flashinfer_emulator.module(9), 9), 4, PADDED, ALL_ROWS),
    "flashinfer, drafts": ("mla", lambda: FlashInferMLA(flashinfer_emulator.module(10), 10), 1, EXACT, 5),
    "fa3, drafts": ("mla", lambda: FA3MLA(fa3_emulator.module()), 8, PADDED, 5),
    "flashmla, drafts": (
        "mla", lambda: FlashMLA(flash_mla_emulator.module(), expanded=TorchMLA()), 64, PADDED, ALL_ROWS,
    ),
    "flashinfer, GQA": ("gqa", lambda: FlashInferGQA(flashinfer_emulator.module()), 4, EXACT, ALL_ROWS),
    "fa3, GQA": ("gqa", lambda: FA3GQA(fa3_emulator.module()), 1, PADDED, 5),
    "flashinfer, windows": ("windows", lambda: FlashInferGQA(flashinfer_emulator.module()), 4, PADDED, ALL_ROWS),
    "fa3, windows": ("windows", lambda: FA3GQA(fa3_emulator.module()), 1, PADDED, ALL_ROWS),
    "flashinfer, some windows": (
        "some windows", lambda: FlashInferGQA(flashinfer_emulator.module()), 4, PADDED, ALL_ROWS,
    ),
    "fa3, some windows": ("some windows", lambda: FA3GQA(fa3_emulator.module()), 1, PADDED, ALL_ROWS),
    "flashinfer, fp8": (
        "mla", lambda: FlashInferMLA(flashinfer_emulator.module(9), 9, E4M3_TENSOR), 4, PADDED, ALL_ROWS,
    ),
    "trtllm_mla, fp8": ("mla", lambda: TrtllmMLA(flashinfer_emulator.module(10), 10), 32, PADDED, ALL_ROWS),
    "flashmla, fp8, drafts": (
        "mla", lambda: FlashMLA(flash_mla_emulator.module(9, wheel=True), TorchMLA(), 9, None, E4M3_TENSOR), 64, PADDED,
        ALL_ROWS,
    ),
}  # fmt: skip


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mla": ("deepseek_v3", LATENT | {"first_k_dense_replace": 1}),
    "gqa": ("qwen3", {"head_dim": 64}),
    "windows": ("mistral", {"head_dim": 64, "sliding_window": 6}),
    "some windows": (
        "qwen2",
        {"head_dim": 64, "num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 6}
        | {"max_window_layers": 1},
    ),
}


DRAFTERS: dict[str, dict[str, Any]] = {
    "two MTP layers": {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 1},
    "draft model": {"speculative_algorithm": "STANDALONE", "speculative_eagle_topk": 1},
    "prompt lookup": {"speculative_algorithm": "NGRAM"},
    "draft model, windows": {"speculative_algorithm": "STANDALONE", "speculative_eagle_topk": 1},
}
ALTERNATING: dict[str, Any] = {
    "num_hidden_layers": 2, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense"],
}  # fmt: skip
"""Of MiMo-V2-Flash, whose layers with a window have other KV heads: captured plans of both kinds stay apart."""


def check_captured_drafts(engine: InProcessEngine, requests: list[Scripted], settings: GraphSettings) -> None:
    """Captured steps with drafts never wait, and their tokens are those of steps without graphs. Closes the engine."""
    try:
        runner = engine.worker.runner
        expected = engine.run(requests)
        assert capture_graphs(runner, settings) == settings.num_graphs and runner.drafted is not None
        found = watched(engine, requests)
    finally:
        engine.close()
    check_answers(found.answers, expected, tolerance=1e-4)
    drafted = [step for step in found.steps if step.plan.speculation is not None and step.plan.speculation.depth]
    captured = [step for step in drafted if step.cuda_graph]
    assert len(captured) > 1 and not any(step.waits for step in captured), captured
    assert all(step.cuda_graph for step in drafted if set(step.plan.counts) == {settings.counts[-1]})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if not name.startswith("draft model") else [])
        for name in DRAFTERS
    ],
)
def test_captured_drafts_of_every_kind_never_wait(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of steps without graphs. The draft model has Triton attention, whose plans are upper bounds. Only a
    step with other counts, of prompts or of last tokens, reads lengths on the host. With windows model and draft model
    have layers with and without one, and contexts exceed it."""
    choose = build_runner.kernels_for
    libraries.install()
    own, windows = name.startswith("draft model"), name.endswith("windows")
    triton_row: Callable[[], Any] = TritonGQA if windows else TritonMLA
    make: Callable[[], Any] = triton_row if own else lambda: FA3MLA(fa3_emulator.module())
    monkeypatch.setattr(build_runner, "kernels_for", lambda *args: replace(choose(*args), attention=make()))
    fields, dtype = ({}, "float32") if own else (LATENT, "bfloat16")
    if windows:
        path = agreeing_checkpoint("mimo_v2_flash", tmp_path / "model", 5, **ALTERNATING)
    else:
        path = agreeing_checkpoint(
            "deepseek_v3", tmp_path / "model", 5, num_hidden_layers=1, num_mtp_layers=2, first_k_dense_replace=3,
            **fields,
        )  # fmt: skip
    flags = DRAFTERS[name] | {"speculative_num_steps": DRAFTS, "speculative_num_draft_tokens": DRAFTS + 1}
    if own:
        flags |= {"speculative_draft_model_path": str(path)}
    engine = InProcessEngine(
        path, tmp_path / "board", device="cuda", dtype=dtype, page_size=1, max_total_tokens=256,
        max_running_requests=2, context_length=24, chunked_prefill_size=8, disable_cuda_graph=True,
        **FEW, **flags,
    )  # fmt: skip
    assert bool(engine.config.num_window_slots) == windows
    requests = [
        Scripted(
            f"r{i}", [*range(5, 9), 5, 6, 7, 20 + i], 8, 0, seed=i, sampling={"temperature": i / 2}, logprob=i == 0
        )
        for i in range(2)
    ]
    check_captured_drafts(engine, requests, GraphSettings((1, 2), counts=(1, DRAFTS + 1)))


@pytest.mark.parametrize("row", ["triton", "fa3"])
def test_captured_trees_never_wait(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of steps without graphs, and as many accepted drafts."""
    choose = build_runner.kernels_for
    libraries.install()
    make: Callable[[], Any] = TritonMLA if row == "triton" else lambda: FA3MLA(fa3_emulator.module())
    monkeypatch.setattr(build_runner, "kernels_for", lambda *args: replace(choose(*args), attention=make()))
    fields, dtype = ({}, "float32") if row == "triton" else (LATENT, "bfloat16")
    path = agreeing_checkpoint(
        "deepseek_v3", tmp_path / "model", 5, num_hidden_layers=1, num_mtp_layers=1, first_k_dense_replace=3, **fields
    )
    engine = InProcessEngine(
        path, tmp_path / "board", device="cuda", dtype=dtype, page_size=1, max_total_tokens=256,
        max_running_requests=2, context_length=24, chunked_prefill_size=8, disable_cuda_graph=True,
        **FEW, **(TREE | {"speculative_num_draft_tokens": 5}),
    )  # fmt: skip
    requests = [
        Scripted(f"r{i}", [*range(5, 9), 5, 20 + i], 10, 0, seed=i, sampling={"temperature": i / 2}, logprob=True)
        for i in range(2)
    ]
    check_captured_drafts(engine, requests, GraphSettings((1, 2), counts=(1, 5), trees=True))


def mixed_script(seed: int) -> list[Scripted]:
    """The first request ends first and has a penalty: with drafts its steps wait for the lengths."""
    pick = random.Random(seed)
    samplings: list[dict[str, Any]] = [GREEDY | {"frequency_penalty": 0.7}, {"temperature": 0.9, "top_p": 0.9}, GREEDY]
    return [
        Scripted(
            f"r{i}", [pick.randrange(250) for _ in range(pick.randint(2, 10))], 4 + 4 * i, 0,
            sampling=samplings[i % 3],
            seed=i, logprob=i % 2 == 0,
        ) for i in range(3)
    ]  # fmt: skip


QUICK = ("flashinfer", "fa3, drafts", "flashinfer, some windows", "fa3, some windows", "trtllm_mla, fp8")
"""One library each for windows, a latent cache, drafts, e4m3 queries. `test_plans.py` has the plans of all."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.exhaustive) for name in LIBRARIES]
)
def test_replayed_steps_of_libraries_make_the_same_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded and exact sizes. Steps with more rows of logits than allowed at once are captured without the LM head."""
    kind, make, page_size, settings, rows_at_once = LIBRARIES[name]
    drafts = name.endswith("drafts")
    choose = build_runner.kernels_for
    libraries.install()
    monkeypatch.setattr(build_runner, "kernels_for", lambda *args: replace(choose(*args), attention=make()))
    model, fields = MODELS[kind]
    path = agreeing_checkpoint(
        model, tmp_path / "model", 3, num_mtp_layers=int(drafts), **({"num_hidden_layers": 1} | fields)
    )
    chain = CHAIN | {"speculative_num_steps": DRAFTS, "speculative_num_draft_tokens": DRAFTS + 1}
    engine = InProcessEngine(
        path, tmp_path / "board", device="cuda", dtype="bfloat16", page_size=page_size, max_total_tokens=512,
        max_running_requests=3, context_length=24, chunked_prefill_size=max(8, page_size), disable_cuda_graph=True,
        moe_runner_backend="torch", kv_cache_dtype=E4M3_TENSOR if "fp8" in name else "auto",
        **FEW, **(chain if drafts else {}),
    )  # fmt: skip
    try:
        assert bool(engine.config.num_window_slots) == kind.endswith("windows")
        runner, requests = engine.worker.runner, mixed_script(page_size)
        monkeypatch.setattr(runner.sampler, "passes", LogitsPasses(rows_at_once))
        expected = engine.run(requests)
        settings = replace(settings, counts=(1, DRAFTS + 1) if drafts else (1,))
        assert capture_graphs(runner, settings) == settings.num_graphs
        found = watched(engine, requests)
    finally:
        engine.close()
    check_answers(found.answers, expected, tolerance=1e-4)
    replayed = [step.plan for step in found.steps if step.cuda_graph]
    assert len(replayed) > 3 and all(len(plan.rows) == plan.num_decodes for plan in replayed)
    sizes = {len(plan.rows) for plan in replayed}
    assert len(sizes) > 1 and bool(sizes - set(settings.sizes)) == settings.pad
    if drafts:
        assert {count for plan in replayed for count in plan.counts} >= {DRAFTS + 1}
        if runner.drafted is None:
            check_one_wait_a_step(found)
        else:  # only mixed steps, and penalties, need the lengths on the host
            penal = [step for step in found.steps if step.cuda_graph and step.waits]
            assert all("token_buffer.py" in wait for step in penal for wait in step.waits), penal
            unedited = [step for step in found.steps if step.cuda_graph and not step.waits]
            assert len(unedited) > 1
    eager = [step.plan for step in found.steps if step.plan.rows and not step.cuda_graph]
    assert any(len(plan.rows) > plan.num_decodes for plan in eager)  # prompts
    for layer in runner.kv_pool.layers:
        assert all(part[: runner.kv_pool.page_size].float().isfinite().all() for part in layer)
    if name == "flashinfer":  # its page-locked plan is overwritten only after the copy has ended
        assert all(wait.startswith("Event.synchronize: vendors/flashinfer.py") for wait in found.waits), found.waits
