"""The choice of a rank's `ChainKernels`, `TreeKernels` and `DecodeKernels`."""

from __future__ import annotations

from moe_engine.kernels.sampling.protocol import SamplingKernel
from moe_engine.kernels.speculation.decode_inputs import DecodeKernels, TorchDecodes
from moe_engine.kernels.speculation.protocol import ChainKernels
from moe_engine.kernels.speculation.reference import TorchChains
from moe_engine.kernels.speculation.trees import TorchTrees, TreeKernels


def chain_kernels(sampling: SamplingKernel) -> ChainKernels:
    """Triton's, if sampling runs in Triton too; else torch's, which run on any device."""
    if sampling.name != "triton":
        return TorchChains()
    from moe_engine.kernels.speculation.triton_chains import TritonChains

    return TritonChains()


def tree_kernels(sampling: SamplingKernel) -> TreeKernels:
    """As `chain_kernels`."""
    if sampling.name != "triton":
        return TorchTrees()
    from moe_engine.kernels.speculation.triton_trees import TritonTrees

    return TritonTrees()


def decode_kernels(sampling: SamplingKernel) -> DecodeKernels:
    """As `chain_kernels`."""
    if sampling.name != "triton":
        return TorchDecodes()
    from moe_engine.kernels.speculation.triton_decode_inputs import TritonDecodes

    return TritonDecodes()
