"""Peers' memory among processes of one host, for kernels under Triton's interpreter: addresses of a shared mapping."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.symm_mem.memory import SharedBytes
from moe_engine.parallel.shared_segment import SharedSegment

INTERPRETED = {"TRITON_INTERPRET": "1"}
"""The environment of ranks that run kernels; Triton reads it during its import."""


class HostSymmetricMemory:
    """All ranks' bytes are in one segment, which each process maps at its own addresses."""

    def __init__(self) -> None:
        assert os.environ.get("TRITON_INTERPRET") == "1", "kernels on host memory need the interpreter"
        from tests.kernels.triton import interpreter

        interpreter.install()
        self.own: list[Tensor] = []
        """Memory allocated by this rank, which tests can overwrite."""

    def allocate(self, group: Group, num_bytes: int) -> SharedBytes:
        size = -(-num_bytes // 4096) * 4096
        parts = SharedSegment(group, group.size * size, num_flags=1).bytes.split(size)
        self.own.append(parts[group.rank][:num_bytes])
        return SharedBytes(self.own[-1], [part.data_ptr() for part in parts])

    def words_for_host(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)
