"""Common parts of the emulators of vendor libraries, which refuse invalid calls as the real library does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NAN = float("nan")


class ContractBroken(Exception):
    """The caller violated the real library's contract, or relies on unspecified behavior."""


def must(condition: bool, text: str) -> None:
    if not condition:
        raise ContractBroken(text)


def check_shape(x: Tensor, shape: Sequence[int], name: str) -> None:
    must(tuple(x.shape) == tuple(shape), f"{name} is {list(x.shape)}, not {list(shape)}")


def check_index(x: Tensor, name: str, dims: int = 1) -> None:
    must(x.dtype == torch.int32, f"{name} must be int32, is {x.dtype}")
    must(x.dim() == dims and x.stride(-1) == 1, f"{name} must have {dims} dimensions, the last contiguous")


def poison(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory with arbitrary contents, as after a library call."""
    return torch.full(shape, NAN, dtype=dtype)


def softmax_rows(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> tuple[Tensor, Tensor]:
    """q [t, H, W], k [s, G, W], v [s, G, V], seen [t, s] -> out [t, H, V], log-sum-exp [t, H] (natural), in float64.

    A row without visible keys gives 0 and -inf.
    """
    share = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(share, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->ths", q.double(), k) * scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse.isfinite()[..., None], (scores - lse[..., None]).exp(), 0.0)
    return torch.einsum("ths,shv->thv", weights, v), lse


def causal(num_queries: int, num_keys: int) -> Tensor:
    """[t, s]: the queries are at the positions of the last keys."""
    return torch.arange(num_keys)[None] <= torch.arange(num_keys - num_queries, num_keys)[:, None]


def in_window(seen: Tensor, left: int) -> Tensor:
    """`seen` [t, s] without the keys more than `left` positions before each query; -1: all keys."""
    num_queries, num_keys = seen.shape
    own = torch.arange(num_keys - num_queries, num_keys)[:, None]
    return seen if left < 0 else seen & (torch.arange(num_keys)[None] >= own - left)


def everything(num_queries: int, num_keys: int) -> Tensor:
    return torch.ones(num_queries, num_keys, dtype=torch.bool)
