"""An emulator of DeepGEMM's MegaMoE on Hopper, for ranks that are threads of one process, with the library's checks.

Source: sgl-deep-gemm 0.2.5: deep_gemm/__init__.py, the asserts in its binary (csrc/apis/sm90_mega.hpp), and
deep_gemm/include/deep_gemm/impls/sm90_mega_moe_pre_dispatch.cuh. Written without the adapters' code.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.vendors.contract import check_shape, must

TOKENS = 128
"""The capacity is a multiple of it."""
SECONDS = 30.0


@dataclass
class World:
    """What ranks share: buffers, weights and bounds of the current call."""

    size: int
    barrier: threading.Barrier = field(init=False)
    buffers: dict[int, Any] = field(default_factory=dict)
    weights: dict[int, Any] = field(default_factory=dict)
    bounds: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)

    def group(self, rank: int) -> Any:
        return SimpleNamespace(world=self, rank=lambda: rank, size=lambda: self.size, barrier=self.wait)

    def wait(self) -> None:
        self.barrier.wait(SECONDS)


class MegaMoeEmulator:
    """`module` is the stand-in. `calls`: (tokens, bound) of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.module: Any = SimpleNamespace(
            get_symm_buffer_for_sm90_mega_moe=_buffer, transform_weights_for_mega_moe_sm90=_transform,
            mega_moe_pre_dispatch_sm90=_pre_dispatch, fp8_mega_moe=self._run,
        )  # fmt: skip

    def _run(
        self, y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats=None, recipe=(128, 128, 128),
        activation="swiglu", activation_clamp=None, fast_math=True, num_tokens_bound=None,
    ):  # fmt: skip
        buffer, rank, world = sym_buffer, sym_buffer.group.rank(), sym_buffer.group.world
        bound = num_tokens_bound or 0
        must(recipe == (128, 128, 128) and activation == "swiglu" and activation_clamp is None, "recipe")
        must(y.dtype == torch.bfloat16 and y.is_contiguous() and y.shape[1] == buffer.hidden, "y")
        must(len(y) <= buffer.num_max_tokens_per_rank, "num_tokens <= num_max_tokens_per_rank")
        must(bound == 0 or bound >= len(y), "num_tokens_bound == 0 or num_tokens_bound >= num_tokens")
        must(bound <= buffer.num_max_tokens_per_rank, "num_tokens_bound <= num_max_tokens_per_rank")
        held, wide, narrow = buffer.num_experts // world.size, buffer.hidden, buffer.intermediate_hidden
        for (data, scales), shape in zip((l1_weights, l2_weights), ((2 * narrow, wide), (wide, narrow))):
            must(data.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32, "dtypes of weights")
            must(data.is_contiguous() and scales.is_contiguous(), "weights must be contiguous")
            check_shape(data, (held, *shape), "weights")
            check_shape(scales, (held, shape[0] // 128, shape[1] // 128), "scales")
        stats = cumulative_local_expert_recv_stats
        must(stats is None or (stats.dtype == torch.int32 and stats.numel() == held), "recv_stats")
        self.calls.append((len(y), bound))
        world.weights[rank] = _plain(*l1_weights, gran=8), _plain(*l2_weights)
        world.bounds[rank] = bound
        world.wait()  # the inputs of all ranks are there
        must(len(set(world.bounds.values())) == 1, f"the ranks have different bounds: {world.bounds}")
        y.copy_(_sums(buffer, len(y), world, held))
        if stats is not None:
            stats += _arrived(world, rank, held)
        world.wait()  # no rank reads inputs any more


def _buffer(
    group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, use_fp8_dispatch=True,
    activation="swiglu",
):  # fmt: skip
    must(use_fp8_dispatch and activation == "swiglu", "use_fp8_dispatch")
    must(num_experts % group.size() == 0 and 0 < group.size() <= 32, "num_ranks")
    must(hidden % 512 == 0 and intermediate_hidden % 256 == 0, "hidden % 512 == 0 and intermediate_hidden % 256 == 0")
    must(intermediate_hidden // 64 <= 64 and 0 < num_topk <= 32, "intermediate_hidden / 64 <= 64")
    capacity = -(-num_max_tokens_per_rank // TOKENS) * TOKENS
    made = SimpleNamespace(
        group=group, num_experts=num_experts, num_max_tokens_per_rank=capacity, num_topk=num_topk, hidden=hidden,
        intermediate_hidden=intermediate_hidden, x=torch.zeros(capacity, hidden, dtype=torch.float8_e4m3fn),
        x_sf=torch.zeros(capacity, hidden // 128), topk_idx=torch.zeros(capacity, num_topk, dtype=torch.int64),
        topk_weights=torch.zeros(capacity, num_topk),
    )  # fmt: skip
    group.world.buffers[group.rank()] = made
    group.barrier()
    return made


def _transform(l1_weights: Any, l2_weights: Any) -> Any:
    data, scales = l1_weights
    gate, up = data.view(torch.uint8).chunk(2, dim=1)
    pieces = [piece for pair in zip(gate.split(8, dim=1), up.split(8, dim=1)) for piece in pair]
    return (torch.cat(pieces, dim=1).view(data.dtype), scales), l2_weights


def _pre_dispatch(
    x, topk_idx, topk_weights, buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights, num_tokens, group_size=128,
    routed_scaling_factor=1.0,
):  # fmt: skip
    must(x.dtype == torch.bfloat16 and x.is_contiguous() and group_size == 128, "x.scalar_type() == torch::kBFloat16")
    must(topk_idx.dtype == torch.int32 and topk_weights.dtype == torch.float32, "dtypes of choices")
    must(topk_idx.is_contiguous() and topk_weights.is_contiguous(), "choices must be contiguous")
    must(num_tokens == len(x) == len(topk_idx) <= len(buf_x), "num_tokens <= padded_max")
    must(x.shape[1] // 8 <= 1024, "num_threads <= 1024")
    blocks = x.float().unflatten(1, (-1, 128))
    scales = blocks.abs().amax(-1).clamp_min(1e-10) / 448
    buf_x[:num_tokens] = (blocks / scales[..., None]).clamp(-448, 448).to(buf_x.dtype).flatten(1)
    buf_x_sf[:num_tokens] = scales
    buf_topk_idx.fill_(-1)
    buf_topk_weights.zero_()
    buf_topk_idx[:num_tokens] = topk_idx
    buf_topk_weights[:num_tokens] = topk_weights * routed_scaling_factor


def _plain(data: Tensor, scales: Tensor, gran: int = 0) -> Tensor:
    """float64 [E, N, K]; gran: rows of gate and up that alternate."""
    if gran:
        pairs = data.view(torch.uint8).split(2 * gran, dim=1)
        halves = [torch.cat([pair[:, begin : begin + gran] for pair in pairs], 1) for begin in (0, gran)]
        data = torch.cat(halves, 1).view(data.dtype)
    return data.double() * scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)


def _sums(buffer: Any, tokens: int, world: World, held: int) -> Tensor:
    """Activations are quantized by blocks of 64 between the products."""
    x = buffer.x[:tokens].double() * buffer.x_sf[:tokens].double().repeat_interleave(128, 1)
    out = torch.zeros_like(x)
    for token in range(tokens):
        chosen = buffer.topk_idx[token].tolist()
        named = [e for e in chosen if e >= 0]
        must(len(named) == len(set(named)) and all(e < buffer.num_experts for e in named), f"choices {chosen}")
        for slot, expert in enumerate(chosen):
            if expert < 0:
                continue
            first, second = (part[expert % held] for part in world.weights[expert // held])
            gate, up = (first @ x[token]).chunk(2)
            inner = (gate * torch.sigmoid(gate) * up).view(-1, 64)
            scale = inner.abs().amax(1, keepdim=True).clamp_min(1e-10) / 448
            inner = (inner / scale).float().to(torch.float8_e4m3fn).double() * scale
            out[token] += float(buffer.topk_weights[token, slot]) * (second @ inner.flatten())
    return out


def _arrived(world: World, rank: int, held: int) -> Tensor:
    ids = torch.cat([buffer.topk_idx.flatten() for buffer in world.buffers.values()])
    return torch.bincount(ids[ids // held == rank] % held, minlength=held).int()
