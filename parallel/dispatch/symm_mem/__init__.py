"""Low-latency dispatch through symmetric memory: our kernels over NVLink, NVSHMEM's between nodes."""

from moe_engine.parallel.dispatch.symm_mem.availability import why_not, why_not_nvshmem

__all__ = ["why_not", "why_not_nvshmem"]
