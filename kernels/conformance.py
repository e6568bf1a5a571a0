"""Type checks of the tables' rows: mypy verifies here that each implements its family's protocol, with all signatures.

Rows are imported by their dotted paths, which no type checker follows. Nothing imports this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_engine.kernels.attention import cpu as cpu_attention
    from moe_engine.kernels.attention import reference as torch_attention
    from moe_engine.kernels.attention.protocol import GQABackend, MLABackend
    from moe_engine.kernels.attention.triton import attention as triton_attention
    from moe_engine.kernels.attention.vendors.fa3 import FA3GQA, FA3MLA
    from moe_engine.kernels.attention.vendors.flashinfer_gqa import FlashInferGQA
    from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA
    from moe_engine.kernels.attention.vendors.flashmla import FlashMLA
    from moe_engine.kernels.attention.vendors.trtllm_mla import TrtllmMLA
    from moe_engine.kernels.block_index.cpu import CpuBlockIndex
    from moe_engine.kernels.block_index.protocol import BlockIndexKernel
    from moe_engine.kernels.block_index.reference import TorchBlockIndex
    from moe_engine.kernels.block_index.triton_blocks import TritonBlockIndex
    from moe_engine.kernels.compression.cpu import CpuCompression
    from moe_engine.kernels.compression.protocol import CompressionKernel
    from moe_engine.kernels.compression.reference import TorchCompression
    from moe_engine.kernels.compression.triton_compression import TritonCompression
    from moe_engine.kernels.delta.cpu import CpuDelta
    from moe_engine.kernels.delta.protocol import DeltaKernel
    from moe_engine.kernels.delta.reference import TorchDelta
    from moe_engine.kernels.delta.triton_delta import TritonDelta
    from moe_engine.kernels.experts.cpu import CpuExperts
    from moe_engine.kernels.experts.deep_gemm import DeepGemmExperts
    from moe_engine.kernels.experts.flashinfer_trtllm import TrtllmExperts
    from moe_engine.kernels.experts.mega_moe import MegaMoe
    from moe_engine.kernels.experts.protocol import ExpertsKernel
    from moe_engine.kernels.experts.reference import TorchExperts
    from moe_engine.kernels.experts.triton_experts import TritonExperts
    from moe_engine.kernels.indexer.cpu import CpuIndexer
    from moe_engine.kernels.indexer.deep_gemm import DeepGemmIndexer
    from moe_engine.kernels.indexer.protocol import IndexerKernel
    from moe_engine.kernels.indexer.reference import TorchIndexer
    from moe_engine.kernels.indexer.triton_indexer import TritonIndexer
    from moe_engine.kernels.linear.cpu import CpuLinear
    from moe_engine.kernels.linear.deep_gemm import DeepGemmLinear
    from moe_engine.kernels.linear.protocol import LinearKernel
    from moe_engine.kernels.linear.reference import TorchLinear
    from moe_engine.kernels.linear.triton_linear import TritonLinear
    from moe_engine.kernels.lora.cpu import CpuLora
    from moe_engine.kernels.lora.protocol import LoraKernel
    from moe_engine.kernels.lora.reference import TorchLora
    from moe_engine.kernels.lora.triton_lora import TritonLora
    from moe_engine.kernels.ops.cpu import CpuOps
    from moe_engine.kernels.ops.protocol import Ops
    from moe_engine.kernels.ops.reference import TorchOps
    from moe_engine.kernels.ops.triton_ops import TritonOps
    from moe_engine.kernels.permutation.cpu import CpuPermutation
    from moe_engine.kernels.permutation.protocol import Permutation
    from moe_engine.kernels.permutation.reference import TorchPermutation
    from moe_engine.kernels.permutation.triton_permute import TritonPermutation
    from moe_engine.kernels.sampling.cpu import CpuSampling
    from moe_engine.kernels.sampling.flashinfer import FlashInferSampling
    from moe_engine.kernels.sampling.protocol import SamplingKernel
    from moe_engine.kernels.sampling.reference import TorchSampling
    from moe_engine.kernels.sampling.triton_sampling import TritonSampling
    from moe_engine.kernels.varlen.protocol import VarlenKernel
    from moe_engine.kernels.varlen.reference import TorchVarlen
    from moe_engine.kernels.varlen.triton_varlen import TritonVarlen

    MLA: list[MLABackend] = [
        torch_attention.TorchMLA(), cpu_attention.CpuMLA(), triton_attention.TritonMLA(), FA3MLA(), FlashInferMLA(),
        FlashMLA(), TrtllmMLA(),
    ]  # fmt: skip
    GQA: list[GQABackend] = [
        torch_attention.TorchGQA(), cpu_attention.CpuGQA(), triton_attention.TritonGQA(), FA3GQA(), FlashInferGQA(),
    ]  # fmt: skip
    EXPERTS: list[ExpertsKernel] = [
        TorchExperts(), CpuExperts(), TritonExperts(), DeepGemmExperts(), TrtllmExperts(), MegaMoe(),
    ]  # fmt: skip
    LINEAR: list[LinearKernel] = [TorchLinear(), CpuLinear(), TritonLinear(), DeepGemmLinear()]
    OPS: list[Ops] = [TorchOps(), CpuOps(), TritonOps()]
    SAMPLING: list[SamplingKernel] = [TorchSampling(), CpuSampling(), TritonSampling(), FlashInferSampling()]
    PERMUTATION: list[Permutation] = [TorchPermutation(), CpuPermutation(), TritonPermutation()]
    INDEXER: list[IndexerKernel] = [TorchIndexer(), CpuIndexer(), TritonIndexer(), DeepGemmIndexer()]
    BLOCK_INDEX: list[BlockIndexKernel] = [TorchBlockIndex(), CpuBlockIndex(), TritonBlockIndex()]
    VARLEN: list[VarlenKernel] = [TorchVarlen(), TritonVarlen()]
    DELTA: list[DeltaKernel] = [TorchDelta(), CpuDelta(), TritonDelta()]
    COMPRESSION: list[CompressionKernel] = [TorchCompression(), CpuCompression(), TritonCompression()]
    LORA: list[LoraKernel] = [TorchLora(), CpuLora(), TritonLora()]
