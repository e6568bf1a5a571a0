"""Sampling where ranks might differ: all draw, rank 0's draw counts.

Ranks of an attention group compute the same logits from the same sums and draw with the same seeds, so by default
nothing is sent. Where their kernels or devices differ in the last bit, a runner is given this sampler instead.
"""

from __future__ import annotations

from torch import Tensor

from moe_engine.kernels.sampling.protocol import SamplingKernel
from moe_engine.parallel.collectives import Group
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampler import SampledRows, Sampler
from moe_engine.worker.sampling_state import SamplingState


class AgreedSampler(Sampler):
    """A sampler whose answers are those of the group's rank 0, on every rank. Raises `PeerLost`."""

    def __init__(
        self, state: SamplingState, stream: DeviceStream, group: Group, kernel: SamplingKernel | None = None
    ) -> None:
        super().__init__(state, stream, kernel)
        self._group = group

    def sample(self, logits: Tensor, sampled: SampledRows) -> Tensor:
        return self._group.broadcast(super().sample(logits, sampled).contiguous(), 0)

    def probabilities(self, logits: Tensor, sampled: SampledRows, tokens: Tensor) -> Tensor:
        return self._group.broadcast(super().probabilities(logits, sampled, tokens).contiguous(), 0)
