"""DeepSeek V4 on a simulated GPU: captured decodes and steps with drafts compute their rows on the device; the launches
of a layer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.kernels.backends import plan_kernels
from moe_engine.kernels.device import Device
from moe_engine.models.config_file import load_model_config
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.needs import need_of_model
from moe_engine.types.image_tokens import ImageTokens, image_key, keyed_ids
from moe_engine.worker.startup.kernel_choice import build_backends
from tests.engine.harness import Scripted
from tests.models.checkpoints import GATED_STREAMS, POOLED, make_checkpoint
from tests.models.deepseek_v41 import make_v41
from tests.models.qwen4_exp_images import make_qwen4
from tests.models.stepper import Chunk, Stepper
from tests.models.v4_checkpoints import CSA, HCA, SLIDING, make_v4
from tests.models.v4_dspark import make_dspark
from tests.models.v4_mtp import make_agreeing
from tests.models.v41_dspark import make_v41_dspark
from tests.models.v41_tower import IMAGE, VISION, picture
from tests.models.vision_checkpoints import Pixels, random_pixels
from tests.simulated_cuda import kernels
from tests.simulated_cuda.on_device.test_engines import CHAIN, FEW, GREEDY, Step, compared, sometimes_warm
from tests.speculation.agreeing import agreeing_checkpoint

NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 2}
BLOCK = {"speculative_algorithm": "DSPARK", "speculative_num_steps": 2}
FIELDS: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": [HCA, CSA], "num_hash_layers": 1, "sliding_window": 8,
    "compress_rates": {CSA: 2, HCA: 8}, "index_topk": 3, "index_n_heads": 4, "n_routed_experts": 4,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "decodes": {}, "bounded windows": {"chunked_prefill_size": 8, "max_total_tokens": 256}, "n-gram drafts": NGRAM,
    "MTP drafts": CHAIN, "block drafts": BLOCK,
}  # fmt: skip


def short_and_long(first: int = 5, later: int = 3) -> list[Scripted]:
    """A request with a short context, and two with a common prefix whose answers have so many tokens."""
    prefix = [*range(40, 44), 5, 6, random.randrange(250), 5, 8]
    return [
        Scripted("short", [9, 5], 3, 0, sampling=GREEDY),
        Scripted("r0", [*prefix, 7, 5], first, 0, sampling=GREEDY),
        Scripted("r1", [*prefix, 5], later, 5, sampling=GREEDY),
    ]


def captured_steps(path: Path, folder: Path, requests: list[Scripted], form: str, flags: dict[str, Any]) -> list[Step]:
    """The steps that are replayed as CUDA graphs, without waits, of an engine with the answers of the CPU; some have
    drafts in a form with drafts."""
    both = {"context_length": 24, "max_running_requests": 3, "max_total_tokens": 96} | flags
    found = compared(path, folder, requests, both, cuda_graph_bs_decode="2", **FEW)
    replayed = [step for step in found.steps if step.cuda_graph]
    assert found.num_graphs and len(replayed) > 1 and not any(step.waits for step in replayed)
    if "drafts" in form:
        assert any(step.plan.speculation and step.plan.speculation.depth for step in replayed)
    return replayed


@pytest.mark.drawn(3, group="engines on a device")
@pytest.mark.parametrize("form", FORMS)
def test_steps_with_entries_are_captured(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the CPU, with contexts within the window and the top-k and beyond, padded steps, cached prefixes;
    no waits."""
    sometimes_warm(monkeypatch)
    if form == "block drafts":
        path = make_dspark(tmp_path / "model", random.randrange(1 << 30), agreeing=True, taps=(0, 1), **FIELDS)
    else:
        path = make_agreeing(tmp_path / "model", random.randrange(1 << 30), **FIELDS)
    requests = short_and_long(4, 2)
    replayed = captured_steps(path, tmp_path, requests, form, {"page_size": 8} | FORMS[form])
    lens = {start + 1 for step in replayed for start in step.plan.starts}
    assert min(lens) < 8 < max(lens)
    launched = set(kernels.launches)
    assert launched >= {"scores_kernel", "select_kernel", "latent_kernel", "compress_kernel", "rows_kernel"}


POOLED_FIELDS: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "deepseek_sparse_attention"], "index_topk": 8,
    "mlp_layer_types": ["dense", "sparse"], "index_n_heads": 4, "n_routed_experts": 4, "hc_mult": 2,
}  # fmt: skip
V41_FIELDS: dict[str, Any] = {
    "num_hidden_layers": 3, "compress_ratios": [2, 1, 1], "kv_source_layer_ids": [0, 1],
    "index_source_layer_ids": [0, 1, 2], "candidate_source_layer_id": 1, "candidate_topk_blocks": 3,
    "candidate_block_size": 4, "index_topk": 3, "index_n_heads": 4, "sliding_window": 8, "n_routed_experts": 4,
    "engram_layer_ids": [1], "engram_num_embeddings": [630], "hc_mult": 2,
}  # fmt: skip
V41_FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decodes": ({}, {}), "bounded windows": ({}, {"chunked_prefill_size": 8, "max_total_tokens": 256}),
    "n-gram drafts": ({}, NGRAM), "no tables": ({"engram_layer_ids": [], "engram_num_embeddings": []}, {}),
    "block drafts": ({"dspark_target_layer_ids": [0, 1, 2]}, BLOCK),
    "images": (
        {"vision": VISION | {"num_hidden_layers": 1}, "num_hidden_layers": 2, "compress_ratios": [1, 1],
         "kv_source_layer_ids": [0], "index_source_layer_ids": [0, 1], "candidate_source_layer_id": 0}, {},
    ),
}  # fmt: skip


def with_image(request: Scripted, place: int, image: Pixels) -> Scripted:
    """The request with an image before token `place`."""
    data = image.values.numpy().tobytes()
    tokens = ImageTokens(place, image.num_tokens, image_key(data, image.grid), image.grid, data)
    ids = [*request.prompt_ids[:place], *image.placeholders(IMAGE), *request.prompt_ids[place:]]
    return replace(request, prompt_ids=keyed_ids(ids, [tokens]), more={"images": [tokens]})


@pytest.mark.drawn(3, group="engines on a device")
@pytest.mark.parametrize("form", V41_FORMS)
def test_steps_with_shared_entries_are_captured(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the CPU, with contexts within the window, the top-k and the candidates, and beyond; no waits, also
    for rows of n-gram tables."""
    sometimes_warm(monkeypatch)
    fields, flags = V41_FORMS[form]
    if flags is BLOCK:
        path = make_v41_dspark(tmp_path / "model", random.randrange(1 << 30), agreeing=True, **V41_FIELDS | fields)
    else:
        path = make_v41(tmp_path / "model", random.randrange(1 << 30), **V41_FIELDS | fields)
    requests = short_and_long()
    if form == "images":  # decodes whose n-grams would reach into an image, and beyond them
        image = picture(3, 2)
        requests = [with_image(request, place, image) for request, place in zip(requests, (1, 9, 9))]
    replayed = captured_steps(path, tmp_path, requests, form, {"page_size": 8} | flags)
    lens = {sum(part) for step in replayed for part in zip(step.plan.starts, step.plan.counts)}
    assert min(lens) < 8 and max(lens) > 12
    launched = set(kernels.launches)
    assert launched >= {"scores_kernel", "select_kernel", "block_maxima_kernel", "latent_kernel"}


POOLED_FORMS: dict[str, dict[str, Any]] = {
    "decodes": {}, "chunks": {"chunked_prefill_size": 8}, "n-gram drafts": NGRAM, "MTP drafts": CHAIN,
}  # fmt: skip


@pytest.mark.drawn(3, group="engines on a device")
@pytest.mark.parametrize("form", POOLED_FORMS)
def test_steps_over_pools_are_captured(form: str, tmp_path: Path) -> None:
    """GLM-5.3-Flash: the tokens of the CPU, with contexts of no whole pool, of all pools and of selected ones; no
    waits."""
    path = agreeing_checkpoint(POOLED, tmp_path / "model", random.randrange(1 << 30), num_mtp_layers=1, **POOLED_FIELDS)
    requests = short_and_long()
    replayed = captured_steps(path, tmp_path, requests, form, {"page_size": 4} | POOLED_FORMS[form])
    lens = {start + 1 for step in replayed for start in step.plan.starts}
    assert min(lens) < 4 and max(lens) > 12
    wanted = {"scores_kernel", "select_kernel", "pool_keys_kernel", "count_pools_kernel", "place_pools_kernel"}
    assert set(kernels.launches) >= wanted


GATED_FIELDS: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "indexer_budget": 8, "hc_count": 2,
    "ple_layer_ids": [1], "indexer_n_heads": 4, "num_experts": 4,
}  # fmt: skip
GATED_FORMS: dict[str, dict[str, Any]] = {
    "decodes": {}, "chunks": {"chunked_prefill_size": 8}, "n-gram drafts": NGRAM, "images": {},
    "n-gram drafts behind images": NGRAM, "MTP drafts": CHAIN, "MTP drafts behind images": CHAIN,
}  # fmt: skip


@pytest.mark.drawn(2, group="engines on a device")
@pytest.mark.parametrize("form", GATED_FORMS)
def test_steps_over_grouped_pools_are_captured(form: str, tmp_path: Path) -> None:
    """Qwen3.8-Flash-Next: as `test_steps_over_pools_are_captured`; captured decodes complete pools that begin in an
    image."""
    seed = random.randrange(1 << 30)
    path = make_qwen4(tmp_path / "model", seed, agreeing=True, num_mtp_layers=1, **GATED_FIELDS)
    requests = short_and_long()
    if "images" in form:
        image = random_pixels(3, 2, torch.Generator().manual_seed(seed))
        requests = [with_image(request, place, image) for request, place in zip(requests, (1, 9, 9))]
        requests = [replace(request, logprob=True) for request in requests]
    replayed = captured_steps(path, tmp_path, requests, form, {"page_size": 4} | GATED_FORMS[form])
    lens = {start + 1 for step in replayed for start in step.plan.starts}
    assert min(lens) < 10 and max(lens) > 12
    assert set(kernels.launches) >= {"scores_kernel", "select_kernel", "count_pools_kernel", "place_pools_kernel"}


LAUNCHES = {SLIDING: 16, HCA: 18, CSA: 24}


def test_launches_of_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton, with unquantized experts."""
    fields = {"num_hidden_layers": 3, "layer_types": list(LAUNCHES), "num_hash_layers": 0, "index_n_heads": 4}
    path = make_v4(tmp_path, dtype=torch.bfloat16, tokenizer=False, **fields)
    assert dict(zip(LAUNCHES, launches_of(path, monkeypatch), strict=True)) == LAUNCHES


GATED_LAUNCHES = {"before a table": 21, "linear attention with a table": 37, "selected pools": 37}


def test_launches_of_a_layer_with_gated_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3.8-Flash-Next. Operations of torch are launches too; two are left, before a table and in the layer with
    pools. The norm between two layers counts to the first one, or to a second one with a table."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    fields = {"num_hidden_layers": 4, "layer_types": kinds, "ple_layer_ids": [3]}
    path = make_checkpoint(GATED_STREAMS, tmp_path / "table", dtype=torch.bfloat16, tokenizer=False, **fields)
    _, *counts = launches_of(path, monkeypatch)  # the first layer has the work of a step on states too
    assert dict(zip(GATED_LAUNCHES, counts, strict=True)) == GATED_LAUNCHES
    path = make_checkpoint(
        GATED_STREAMS, tmp_path / "none", dtype=torch.bfloat16, tokenizer=False, **fields | {"ple_layer_ids": []}
    )
    assert launches_of(path, monkeypatch)[1:3] == [24, 24]


def launches_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Launches of each layer in a captured decode of two requests, whose kernels compute nothing."""
    monkeypatch.setattr(kernels, "_call", lambda *args, **options: None)
    config = load_model_config(path)
    families = ("attention", "experts", "ops", "indexer", "compression", "delta")
    need = need_of_model(config, "bfloat16", page_size=16)
    asked = dict.fromkeys(families, "triton")
    backends = build_backends(plan_kernels(Device("cuda", "a GPU", (9, 0)), need, asked))
    model: Any = load_model(path, config, LoadOptions("bfloat16", device="cuda"), backends)
    stepper = Stepper(model, config, backends, torch.bfloat16, page_size=16, device="cuda")
    stepper.lengths = [90] * 8
    graph, begins = torch.cuda.CUDAGraph(), list[int]()
    names: list[str] = graph.names  # type: ignore[attr-defined]

    def marked(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (begins.append(len(names)), call(*args))[1]  # type: ignore[func-returns-value]

    with torch.inference_mode():
        batch = stepper.batch([Chunk(i, [5], True) for i in range(2)])
        model.forward(batch)  # a plan in place needs a step before
        batch = replace(batch, attention_plan=model.planner_of_decodes()(batch.attention))
        model._calls = [marked(call) for call in model._calls]
        with torch.cuda.graph(graph):
            model.forward(batch)
    return [end - begin for begin, end in pairwise([*begins, len(names)])]
