"""Which kernels compute. The names are the rows of `kernels.tables`; `--explain` says why each was taken or refused."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.kernels import tables

TENSORRT = "TensorRT-LLM kernels"
MORE_GPU = "more kernels for GPUs"
OTHER_DEVICES = "other accelerators"


def _names(*families: str) -> tuple[str, ...]:
    found = {row.name: None for family in families for row in getattr(tables, family)}
    return ("auto", *found)


def _attention() -> tuple[str, ...]:
    return _names("MLA", "GQA")


def _experts() -> tuple[str, ...]:
    return _names("EXPERTS")


def _linear() -> tuple[str, ...]:
    return _names("LINEAR")


def _ops() -> tuple[str, ...]:
    return _names("OPS")


def _sampling() -> tuple[str, ...]:
    return _names("SAMPLING")


CPU_SYNONYMS = {"torch_native": "torch", "intel_amx": "cpu"}


@dataclass(frozen=True)
class BackendArgs:
    attention_backend: str = flag(
        "auto",
        "Attention kernels. auto: the preferred backend among those that run here. A named backend that cannot run is "
        "an error.",
        choices=_attention,
        synonyms=CPU_SYNONYMS,
        unsupported={
            **dict.fromkeys(("trtllm_mla", "trtllm_mha"), TENSORRT),
            **dict.fromkeys(("fa4", "flex_attention", "cutedsl_mla", "cutlass_mla"), MORE_GPU),
            **dict.fromkeys(("dsa", "nsa", "qsa", "dsv4"), "sparse attention (DeepSeek V3.2)"),
            **dict.fromkeys(("aiter", "wave", "ascend", "intel_xpu"), OTHER_DEVICES),
        },
    )  # fmt: skip
    moe_runner_backend: str = flag(
        "auto",
        "Grouped matrix products of the routed experts.",
        choices=_experts,
        synonyms=CPU_SYNONYMS,
        unsupported={
            "flashinfer_trtllm": TENSORRT,
            **dict.fromkeys(
                ("triton_kernel", "flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_mxfp4", "cutlass", "marlin"),
                MORE_GPU,
            ),
        },
    )
    linear_backend: str = flag("auto", "Matrix products with dense weights.", choices=_linear)
    ops_backend: str = flag("auto", "Norms, rotary embedding, activation, cache writes and routing.", choices=_ops)
    sampling_backend: str = flag(
        "auto",
        "Drawing tokens from logits. pytorch means the torch row.",
        choices=_sampling,
        synonyms={"pytorch": "torch"},
        unsupported=dict.fromkeys(("ascend", "intel_xpu"), OTHER_DEVICES),
    )
    enable_deterministic_inference: bool = flag(
        False,
        "Answers that do not depend on what else runs: only backends whose sums have a fixed order are taken.",
    )
    enable_torch_compile: bool = flag(
        False,
        "Have torch compile what lies between attention and experts in decodes: norms, projections, rotary, routing. "
        "Small operators and products are then torch's own, in place of this engine's.",
    )
    torch_compile_max_bs: int = flag(32, "Requests of the largest step that is compiled.", metavar="N")
    torch_compile_cache_dir: str | None = flag(
        None,
        "Folder that keeps what torch compiled, for the next start. Left out: torch_compile in this engine's cache "
        "folder, or what TORCHINDUCTOR_CACHE_DIR says.",
        metavar="DIR",
    )
    cpu_threads: int | None = flag(
        None,
        "Threads that compute on a CPU. Left out: the cores this process may use (affinity and container quota).",
        metavar="N",
    )
