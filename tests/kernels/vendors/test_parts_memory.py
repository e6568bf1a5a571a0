"""Peak memory of MLA for a long prompt, compared with the memory ledger.

Libraries are replaced by stand-ins that only allocate their results, so that an emulator's temporary memory is not
counted.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_engine.kernels import workspaces
from moe_engine.kernels.attention.reference import TorchMLA
from moe_engine.kernels.attention.vendors.fa3 import FA3MLA
from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA
from moe_engine.kernels.workspaces import AttentionLoad
from moe_engine.models import step_memory
from moe_engine.models.needs import head_widths
from tests.kernels.vendors import fa3_emulator, flashinfer_emulator
from tests.kernels.vendors.test_model import stepper
from tests.models.stepper import Chunk

LIMIT = 64


class Held(TorchDispatchMode):
    """The peak bytes of tensors created inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        known = {place for _, place, _ in self._alive()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                place = leaf.untyped_storage().data_ptr()
                if place not in given or place in known:
                    self._made[id(leaf)] = (weakref.ref(leaf), place, leaf.untyped_storage().nbytes())
        self.most = max(self.most, sum({place: size for _, place, size in self._alive()}.values()))
        return result

    def _alive(self) -> list[tuple[weakref.ref[Tensor], int, int]]:
        return [made for made in self._made.values() if made[0]() is not None]


class Allocates:
    """A FlashInfer wrapper, and FlashAttention's function, that only allocate their results."""

    def reset_workspace_buffer(self, buffer: Tensor, plan: Tensor) -> None:
        pass

    def plan(self, starts: Tensor, ends: Tensor, heads: int, groups: int, width: int, **options: Any) -> None:
        pass

    def run(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False) -> Any:
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        return (out, q.new_zeros(q.shape[:2], dtype=torch.float32)) if return_lse else out


def flashinfer() -> FlashInferMLA:
    module = flashinfer_emulator.module()
    backend = FlashInferMLA(module)
    module.BatchPrefillWithRaggedKVCacheWrapper = lambda buffer, layout: Allocates()
    return backend


def fa3() -> FA3MLA:
    module = fa3_emulator.module()

    def varlen(q: Tensor, k: Tensor, v: Tensor, return_attn_probs: bool = False, **options: Any) -> Any:
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        return (out, q.new_zeros(*q.shape[1::-1], dtype=torch.float32)) if return_attn_probs else out

    module.flash_attn_varlen_func = varlen
    return FA3MLA(module)


class TorchAllocates(TorchMLA):
    """Keys and values are read in place, as in the Triton row."""

    def expanded(self, q: Tensor, kv: Tensor, k_rope: Tensor, *rest: Any) -> Tensor:
        return q.new_zeros(*q.shape[:2], kv.shape[2] - q.shape[2] + k_rope.shape[1])

    def expanded_chunk(self, q: Tensor, kv: Tensor, k_rope: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return self.expanded(q, kv, k_rope), q.new_zeros(q.shape[:2], dtype=torch.float32)


@pytest.mark.parametrize(
    "make,copies",
    [(flashinfer, workspaces.flashinfer), (fa3, workspaces.fa3), (TorchAllocates, workspaces.triton)],
)
@pytest.mark.parametrize("before,count", [(0, LIMIT), (0, 150), (120, 31), (1, LIMIT)])
def test_a_long_prompt_holds_no_more_than_the_ledger_counts(checkpoint, monkeypatch, make, copies, before, count):
    """Memory in addition to queries and results, which exist before; one context of the limit's length, and longer
    ones."""
    loaded = stepper(checkpoint, max_expanded_tokens=LIMIT, attention=make())
    attention, config = loaded.model.layers[0].attention, loaded.config
    loaded.step([Chunk(0, [1] * before, False), Chunk(1, [3], False)])  # one-time allocations
    batch = loaded.batch([Chunk(0, [2] * count, False)])
    chunks, cache = attention.chunks(batch), batch.kv[0]
    assert any(chunk.context_chunks for chunk in chunks) == (before + count > LIMIT)
    q = torch.randn(count, config.attention.num_heads, config.attention.qk_head_dim).bfloat16()
    out = torch.empty(count, config.attention.num_heads, config.attention.v_head_dim, dtype=q.dtype)

    def attend() -> None:
        for chunk in chunks:
            attention._attend(q[chunk.tokens], cache, chunk, out[chunk.tokens])

    attend()  # lists of slots and lengths are kept for all layers
    with Held() as held:
        attend()
    monkeypatch.setattr(step_memory, "MAX_ABSORBED_TOKENS", 0)
    counted = step_memory._mla_bytes(config.attention, count, 2, LIMIT) - step_memory._mla_bytes(
        config.attention, count, 2, 0
    )
    load = AttentionLoad(1, 1, head_widths(config), 8, expanded=1)  # plans exist before
    counted += copies(replace(load, expanded=1 + LIMIT)) - copies(load)
    assert counted / 3 < held.most <= counted
