"""Low-latency dispatch through memory that the ranks give to each other: our kernels over NVLink, NVSHMEM's beyond."""

from moe_engine.parallel.dispatch.symm_mem.availability import why_not, why_not_nvshmem

__all__ = ["why_not", "why_not_nvshmem"]
