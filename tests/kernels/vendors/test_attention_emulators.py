"""The emulators of the attention libraries refuse wrong calls: each case is a valid call with one change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moe_engine.kernels.kv_format.latent_records import FP8_GROUPS, pack
from tests.kernels.cpu.formulas import normal
from tests.kernels.vendors import fa3_emulator, flash_mla_emulator, flashinfer_emulator
from tests.kernels.vendors.contract import ContractBroken

BF16 = torch.bfloat16
I32 = torch.int32


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=I32)


def must_break(call, good: dict[str, Any], change: dict[str, Any]) -> None:
    call(**good)
    with pytest.raises(ContractBroken):
        call(**{**good, **change})


# FlashMLA


def dense() -> dict[str, Any]:
    """Fresh tensors and a fresh schedule."""
    return {
        "q": normal(2, 3, 16, 576, dtype=BF16), "k_cache": normal(5, 64, 1, 576, dtype=BF16),
        "block_table": torch.tensor([[1, 4], [3, 99]], dtype=I32), "cache_seqlens": ints(70, 64), "head_dim_v": 512,
        "softmax_scale": 0.1, "causal": True,
    }  # fmt: skip


def run_dense(arch: int = 9, schedule: Any = None, **arguments: Any) -> Any:
    library = flash_mla_emulator.module(arch)
    return library.flash_mla_with_kvcache(
        tile_scheduler_metadata=schedule or library.get_mla_metadata()[0], **arguments
    )


@pytest.mark.parametrize(
    "change",
    [
        {"arch": 10},
        {"q": normal(2, 3, 16, 576, dtype=torch.float32)},
        {"q": normal(2, 3, 16, 560, dtype=BF16)},
        {"k_cache": normal(10, 32, 1, 576, dtype=BF16)},
        {"k_cache": normal(5, 64, 1, 576, dtype=torch.float16)},
        {"block_table": torch.tensor([[1, 4], [3, 0]])},
        {"block_table": torch.tensor([[1, 7], [3, 0]], dtype=I32)},
        {"block_table": torch.tensor([[1], [3]], dtype=I32)},
        {"cache_seqlens": ints(70, 0)},
        {"cache_seqlens": ints(70, 64, 3)},
        {"head_dim_v": 576},
        {"is_fp8_kvcache": True},
        {"num_splits": ints(1)},
    ],
)
def test_flash_mla_dense(change):
    must_break(run_dense, dense(), change)


def test_flash_mla_schedules_are_for_one_step():
    schedule = flash_mla_emulator.FlashMLASchedMeta()
    run_dense(schedule=schedule, **dense())
    run_dense(schedule=schedule, **dense())
    with pytest.raises(ContractBroken, match="schedule"):
        run_dense(schedule=schedule, **{**dense(), "cache_seqlens": ints(71, 64)})
    with pytest.raises(ContractBroken, match="schedule"):
        run_dense(schedule=schedule, **{**dense(), "causal": False})


def test_flash_mla_rows_that_see_nothing():
    out, lse = run_dense(**{**dense(), "cache_seqlens": ints(70, 2)})
    assert out[1, 0].eq(0).all() and lse[1, :, 0].isposinf().all() and lse[0].isfinite().all()


def sparse() -> dict[str, Any]:
    records = pack(normal(32, 576, dtype=BF16), 512, FP8_GROUPS).view(2, 16, 1, 656)
    indices = torch.full((3, 1, 64), -1, dtype=I32)
    indices[:, 0, :5] = torch.randint(0, 32, (3, 5), dtype=I32)
    return {
        "q": normal(3, 1, 64, 576, dtype=BF16), "k_cache": records, "block_table": None, "cache_seqlens": None,
        "head_dim_v": 512, "is_fp8_kvcache": True, "indices": indices,
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"q": normal(3, 1, 16, 576, dtype=BF16)},
        {"q": normal(3, 1, 64, 576, dtype=torch.float16)},
        {"causal": True},
        {"is_fp8_kvcache": False},
        {"indices": torch.zeros(3, 1, 63, dtype=I32)},
        {"indices": torch.full((3, 1, 64), 32, dtype=I32)},
        {"indices": torch.zeros(3, 1, 64, dtype=torch.int64)},
        {"k_cache": torch.zeros(2, 16, 1, 657, dtype=torch.uint8)[..., :656]},
        {"topk_length": ints(5, 5, 5)},
    ],
)
def test_flash_mla_sparse(change):
    must_break(run_dense, sparse(), change)


# FlashAttention 3


def paged() -> dict[str, Any]:
    return {
        "q": normal(5, 4, 64, dtype=BF16), "k_cache": normal(9, 8, 1, 64, dtype=BF16),
        "v_cache": normal(9, 8, 1, 512, dtype=BF16), "qv": normal(5, 4, 512, dtype=BF16),
        "cache_seqlens": ints(10, 8), "page_table": torch.tensor([[0, 8], [3, 99]], dtype=I32),
        "cu_seqlens_q": ints(0, 2, 5), "max_seqlen_q": 3, "causal": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"max_seqlen_q": 2},
        {"cu_seqlens_q": ints(0, 2, 4)},
        {"cu_seqlens_q": torch.tensor([0, 2, 5])},
        {"cache_seqlens": ints(17, 8)},
        {"cache_seqlens": ints(10, 9)},
        {"page_table": torch.tensor([[0, 8], [3, 0]])},
        {"qv": normal(5, 4, 256, dtype=BF16)},
        {"v_cache": normal(9, 8, 1, 128, dtype=BF16), "qv": normal(5, 4, 128, dtype=BF16)},
        {"k_cache": normal(9, 8, 3, 64, dtype=BF16), "v_cache": normal(9, 8, 3, 512, dtype=BF16)},
        {"q": normal(5, 4, 64, dtype=torch.float32)},
    ],
)
def test_fa3_paged(change):
    must_break(fa3_emulator.flash_attn_with_kvcache, paged(), change)


@pytest.mark.parametrize(
    "change",
    [
        {"max_seqlen_k": 9},
        {"cu_seqlens_k": ints(0, 4, 10)},
        {"v": normal(11, 2, 64, dtype=BF16)},
        {"k": normal(11, 2, 128, dtype=BF16)},
        {"causal": True, "cu_seqlens_k": ints(0, 1, 8), "k": normal(8, 2, 192, dtype=BF16),
         "v": normal(8, 2, 128, dtype=BF16)},
    ],
)  # fmt: skip
@pytest.mark.parametrize("wheel", [False, True])
def test_fa3_varlen(change, wheel):
    good = {
        "q": normal(5, 2, 192, dtype=BF16), "k": normal(11, 2, 192, dtype=BF16), "v": normal(11, 2, 128, dtype=BF16),
        "cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 4, 11), "max_seqlen_q": 3, "max_seqlen_k": 7,
    }  # fmt: skip
    library = fa3_emulator.module(wheel)
    must_break(library.flash_attn_varlen_func, good, change)
    keyword, other = ("return_softmax_lse", "return_attn_probs")[:: 1 if wheel else -1]
    with pytest.raises(TypeError, match=other):
        library.flash_attn_varlen_func(**good, **{other: True})
    out, lse, *_ = library.flash_attn_varlen_func(**good, **{keyword: True})
    assert out.shape == (5, 2, 128) and lse.shape == (2, 5) and lse.dtype == torch.float32


# FlashInfer

WORKSPACE = torch.empty(flashinfer_emulator.MIN_WORKSPACE, dtype=torch.uint8)


def csr(**changes: torch.Tensor) -> Any:
    arrays = {
        "qo_indptr": ints(0, 2, 3), "kv_indptr": ints(0, 2, 3), "kv_indices": ints(4, 0, 2),
        "kv_len_arr": ints(13, 5),
    }  # fmt: skip
    return flashinfer_emulator.MLAPlanMetadata.csr(**{**arrays, **changes})


def mla_plan() -> dict[str, Any]:
    return {
        "metadata": csr(), "num_heads": 4, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 8, "causal": True,
        "sm_scale": 0.1, "q_data_type": BF16, "kv_data_type": BF16,
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": csr(kv_len_arr=ints(17, 5))},
        {"metadata": csr(kv_len_arr=torch.tensor([13, 5]))},
        {"metadata": csr(qo_indptr=ints(1, 2, 3))},
        {"metadata": csr(kv_indices=ints(4, 0))},
        {"metadata": csr(kv_indptr=ints(0, 3))},
        {"metadata": csr(qo_indptr=ints(0), kv_indptr=ints(0), kv_len_arr=torch.empty(0, dtype=I32))},
        {"head_dim_ckv": 448},
        {"q_data_type": torch.float32, "kv_data_type": torch.float32},
        {"num_heads": 48, "metadata": csr(qo_indptr=ints(0, 4, 5), kv_len_arr=ints(66, 5), kv_indptr=ints(0, 9, 10),
                                          kv_indices=torch.zeros(10, dtype=I32))},
    ],
)  # fmt: skip
def test_flashinfer_mla_plans(change):
    must_break(flashinfer_emulator.BatchMLAPagedAttentionWrapper(WORKSPACE).plan, mla_plan(), change)


@pytest.mark.parametrize(
    "change",
    [
        {"query": normal(4, 4, 576, dtype=BF16)},
        {"query": normal(3, 4, 576, dtype=torch.float16)},
        {"kv_cache": normal(5, 4, 576, dtype=BF16)},
        {"kv_cache": normal(4, 8, 576, dtype=BF16)},
        {"out": torch.empty(3, 4, 576, dtype=BF16)},
        {"return_lse": True},
    ],
)
def test_flashinfer_mla_runs(change):
    wrapper = flashinfer_emulator.BatchMLAPagedAttentionWrapper(WORKSPACE)
    good = {
        "query": normal(3, 4, 576, dtype=BF16), "kv_cache": normal(5, 8, 576, dtype=BF16),
        "out": torch.empty(3, 4, 512, dtype=BF16),
    }  # fmt: skip
    with pytest.raises(ContractBroken, match="before plan"):
        wrapper.run(**good)
    wrapper.plan(**mla_plan())
    must_break(wrapper.run, good, change)


@pytest.mark.parametrize(
    "change",
    [
        {"q": normal(4, 2, 192, dtype=BF16)},
        {"k": normal(8, 2, 192, dtype=BF16)},
        {"v": normal(7, 2, 128, dtype=torch.float16)},
        {"v": normal(7, 2, 256, dtype=BF16)[..., 128:]},
        {"lse_base": "e"},
    ],
)
def test_flashinfer_ragged_runs(change):
    """Runs as planned; log-sum-exps are to base 2 by default."""
    ragged = flashinfer_emulator.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    plan = {"q_data_type": BF16, "head_dim_vo": 128, "sm_scale": 0.1}
    with pytest.raises(ContractBroken, match="see nothing"):
        ragged.plan(ints(0, 3), ints(0, 2), 2, 2, 192, causal=True, **plan)
    ragged.plan(ints(0, 3), ints(0, 7), 2, 2, 192, **plan)
    good = {
        "q": normal(3, 2, 192, dtype=BF16), "k": normal(7, 2, 192, dtype=BF16), "v": normal(7, 2, 128, dtype=BF16),
        "return_lse": True,
    }  # fmt: skip
    must_break(ragged.run, good, change)
    _, lse = ragged.run(**good)
    scores = torch.einsum("thd,shd->ths", good["q"].double(), good["k"].double()) * 0.1
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1) / math.log(2), rtol=1e-5, atol=1e-5)


def test_flashinfer_prefill_needs_the_dtype_said():
    ragged = flashinfer_emulator.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    tensors = normal(3, 2, 192, dtype=BF16), normal(7, 2, 192, dtype=BF16), normal(7, 2, 128, dtype=BF16)
    ragged.plan(ints(0, 3), ints(0, 7), 2, 2, 192, head_dim_vo=128, causal=True, q_data_type=BF16)
    ragged.run(*tensors)
    ragged.plan(ints(0, 3), ints(0, 7), 2, 2, 192, head_dim_vo=128, causal=True)  # float16, the library's default
    with pytest.raises(ContractBroken, match="planned for"):
        ragged.run(*tensors)
    paged_wrapper = flashinfer_emulator.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    pages = normal(4, 8, 2, 64, dtype=BF16)
    plan = (ints(0, 3), ints(0, 2), ints(3, 1), ints(5), 4, 2, 64, 8)
    paged_wrapper.plan(*plan, causal=True, q_data_type=BF16)
    assert paged_wrapper.run(normal(3, 4, 64, dtype=BF16), (pages, pages)).isfinite().all()
    for wrong in (ints(0), ints(9)):
        with pytest.raises(ContractBroken, match="last pages"):
            paged_wrapper.plan(*plan[:3], wrong, *plan[4:], q_data_type=BF16)
    with pytest.raises(ContractBroken, match="workspace"):
        flashinfer_emulator.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE[:1000])
