"""The choice of a rank's `ChainKernels`."""

from __future__ import annotations

from moe_engine.kernels.sampling.protocol import SamplingKernel
from moe_engine.kernels.speculation.protocol import ChainKernels
from moe_engine.kernels.speculation.reference import TorchChains


def chain_kernels(sampling: SamplingKernel) -> ChainKernels:
    """Triton's, if sampling runs in Triton too; else torch's, which run on any device."""
    if sampling.name != "triton":
        return TorchChains()
    from moe_engine.kernels.speculation.triton_chains import TritonChains

    return TritonChains()
