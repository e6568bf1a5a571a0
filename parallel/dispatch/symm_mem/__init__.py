"""Low-latency dispatch through symmetric memory: this project's kernels over NVLink, NVSHMEM's between nodes."""

from moe_engine.parallel.dispatch.symm_mem.availability import why_not, why_not_nvshmem, why_not_width

__all__ = ["why_not", "why_not_nvshmem", "why_not_width"]
