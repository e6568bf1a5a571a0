"""Attention inside draft trees: the kernel behind each library's adapter, against float64."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.attention.reference import TorchMLA
from moe_engine.kernels.attention.vendors import trees
from moe_engine.kernels.attention.vendors.fa3 import FA3GQA, FA3MLA
from moe_engine.kernels.attention.vendors.flashinfer_gqa import FlashInferGQA
from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA
from moe_engine.kernels.attention.vendors.flashmla import FlashMLA
from moe_engine.kernels.queries import AttentionBatch
from tests.kernels.cpu.formulas import (
    absorbed_attention,
    close_each,
    filled_cache,
    grouped_attention,
    normal,
    paged_queries,
    random_trees,
)
from tests.kernels.vendors import fa3_emulator, flash_mla_emulator, flashinfer_emulator

add_tree = pytest.importorskip("moe_engine.kernels.attention.triton.tree", reason="needs triton").add_tree
launches = pytest.importorskip("tests.kernels.triton.launches", reason="needs triton").launches
BF16 = torch.bfloat16
LATENT, WIDTH = 512, 576
MLA = {
    "fa3": lambda: FA3MLA(fa3_emulator.module()),
    "flashinfer": lambda: FlashInferMLA(flashinfer_emulator.module()),
    "flashmla": lambda: FlashMLA(flash_mla_emulator.module(9, True, False), expanded=TorchMLA()),
}
GQA = {
    "fa3": lambda: FA3GQA(fa3_emulator.module()),
    "flashinfer": lambda: FlashInferGQA(flashinfer_emulator.module()),
}
LENS = ([(5, 90), (1, 1), (0, 4), (7, 7), (2, 66)], [(33, 40), (3, 80)])
"""Contexts, one without tokens before the tree, a request without query tokens, more than one tile of 16 keys."""


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters choose the kernel as they do on a GPU."""
    monkeypatch.setattr(trees, "_kernel", lambda device: add_tree)


@pytest.mark.parametrize("name", MLA)
@pytest.mark.parametrize("lens", LENS)
def test_mla_equals_float64_with_one_launch(name: str, lens: list) -> None:
    backend, heads = MLA[name](), 3 if name == "flashinfer" else 5
    queries, size = paged_queries(lens, 64)
    queries, masks = random_trees(queries)
    cache = filled_cache(queries, size, WIDTH, dtype=BF16)
    q, scale = normal(queries.num_tokens, heads, WIDTH, dtype=BF16), WIDTH**-0.5
    plan = backend.plan(AttentionBatch(queries, None))
    with launches() as found:
        got = backend.absorbed(q, cache, queries, scale, plan)
    assert found == ["tree_kernel"]
    want = absorbed_attention(q, cache, queries, scale, LATENT, masks)
    close_each(got, want, queries, scale=2)  # both parts are rounded


@pytest.mark.parametrize("name", GQA)
@pytest.mark.parametrize(("heads", "groups", "width"), [(6, 2, 64), (32, 4, 128)])
def test_gqa_equals_float64_with_one_launch(name: str, heads: int, groups: int, width: int) -> None:
    backend = GQA[name]()
    queries, size = paged_queries(LENS[0], 16)
    queries, masks = random_trees(queries)
    k, v = (filled_cache(queries, size, groups, width, dtype=BF16) for _ in range(2))
    q, scale = normal(queries.num_tokens, heads, width, dtype=BF16), width**-0.5
    plan = backend.plan(AttentionBatch(queries, None))
    with launches() as found:
        got = backend.paged(q, k, v, queries, scale, plan)
    assert found == ["tree_kernel"]
    close_each(got, grouped_attention(q, k, v, queries, scale, masks), queries, scale=2)


def test_the_kernel_equals_torch() -> None:
    """Strided queries and results, float32, 64 tokens, log-sum-exps to base 2."""
    queries, size = paged_queries([(64, 80), (2, 2), (17, 30)], 1)
    queries, _ = random_trees(queries)
    cache = filled_cache(queries, size, 1, 40, dtype=torch.float32)
    q, out = (normal(queries.num_tokens, 3, 2 * width, dtype=torch.float32)[..., ::2] for width in (40, 24))
    out, lse = out.contiguous(), normal(3, queries.num_tokens, dtype=torch.float32).T
    mask = trees.TreeMask.of(queries)
    own = mask.attend(q, cache, cache[..., :24], 0.3)
    want = mask.merge(out, lse * torch.log(torch.tensor(2.0)), *own)
    add_tree(out, lse, q, cache, cache[..., :24], queries, 0.3, base_2=True)
    assert (out - want).abs().max() < 1e-5


def test_unscaled_e4m3_queries_and_keys_become_the_results_type() -> None:
    queries, size = paged_queries([(4, 9), (3, 30)], 1)
    queries, _ = random_trees(queries)
    cache, q = (torch.randn(n, h, 48).to(torch.float8_e4m3fn) for n, h in ((size, 1), (queries.num_tokens, 3)))
    out, lse = normal(queries.num_tokens, 3, 32, dtype=BF16), normal(queries.num_tokens, 3, dtype=torch.float32)
    mask = trees.TreeMask.of(queries)
    want = mask.merge(out, lse, *mask.attend(q, cache, cache[..., :32], 0.3))
    add_tree(out, lse, q, cache, cache[..., :32], queries, 0.3)
    assert (out - want).abs().max() < 0.05
