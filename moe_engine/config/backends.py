"""Kernel backends. The names are the rows of `kernels.tables`; `--explain` prints why each was chosen or rejected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from moe_engine.config.field import flag
from moe_engine.kernels import tables

TENSORRT = "TensorRT-LLM kernels"
MORE_GPU = "more GPU kernels"
OTHER_DEVICES = "other accelerators"


def _names(*families: str) -> tuple[str, ...]:
    found = {row.name: None for family in families for row in getattr(tables, family)}
    return ("auto", *found)


CPU_SYNONYMS = {"torch_native": "torch", "intel_amx": "cpu"}


@dataclass(frozen=True)
class BackendArgs:
    attention_backend: str = flag(
        "auto",
        "Attention kernels. auto: the most preferred backend that can run on this device. A named backend that cannot "
        "run is an error.",
        choices=partial(_names, "MLA", "GQA"),
        # parts of the model here
        synonyms=CPU_SYNONYMS | dict.fromkeys(("dsa", "nsa", "dsv4", "compressed", "qsa"), "auto"),
        unsupported={
            "trtllm_mha": TENSORRT,
            **dict.fromkeys(
                ("fa4", "flex_attention", "cutedsl_mla", "tokenspeed_mla", "cutlass_mla", "hpc_ops",
                 "minicpm_flashattn", "minicpm_flashinfer", "llada2_cfg_flashinfer"),
                MORE_GPU,
            ),
            **dict.fromkeys(("aiter", "wave", "ascend", "intel_xpu"), OTHER_DEVICES),
        },
    )  # fmt: skip
    moe_runner_backend: str = flag(
        "auto",
        "Grouped GEMM of the routed experts. flashinfer_trtllm: TensorRT-LLM's fused experts on Blackwell, for weights "
        "in block FP8, without --moe-a2a-backend.",
        choices=partial(_names, "EXPERTS"),
        synonyms=CPU_SYNONYMS,
        unsupported={
            **dict.fromkeys(
                (
                    "triton_kernel",
                    "flashinfer_cutlass",
                    "flashinfer_cutedsl",
                    "flashinfer_mxfp4",
                    "cutlass",
                    "marlin",
                    "experimental_sgl_trtllm",
                    "flashinfer_trtllm_routed",
                    "flashinfer_megamoe",
                    "megamoe",
                    "humming",
                    "experimental_sgl_marlin",
                    "lora_cutedsl",
                    "lora_triton",
                    "lora_marlin",
                    "hpc_ops",
                ),
                MORE_GPU,
            ),
            **dict.fromkeys(("aiter", "intel_xpu"), OTHER_DEVICES),
        },
    )
    linear_backend: str = flag("auto", "GEMM of dense weights.", choices=partial(_names, "LINEAR"))
    ops_backend: str = flag(
        "auto", "Norms, rotary embedding, activation, KV cache writes and routing.", choices=partial(_names, "OPS")
    )
    sampling_backend: str = flag(
        "auto",
        "Sampling of tokens from logits. pytorch is another name of torch.",
        choices=partial(_names, "SAMPLING"),
        synonyms={"pytorch": "torch"},
        unsupported=dict.fromkeys(("ascend", "intel_xpu"), OTHER_DEVICES),
    )
    enable_deterministic_inference: bool = flag(
        False,
        "Batch-invariant results: an answer does not depend on the other requests of its batch. Only backends with a "
        "fixed order of summation are used.",
    )
    enable_torch_compile: bool = flag(
        False,
        "Compile the operators between attention and experts of decode steps with torch.compile: norms, projections, "
        "rotary, routing. torch's operators and GEMMs then replace this engine's.",
    )
    torch_compile_max_bs: int = flag(32, "Largest batch size, in requests, that is compiled.", metavar="N")
    torch_compile_cache_dir: str | None = flag(
        None,
        "Folder of torch.compile's cache, reused by the next start. Left out: TORCHINDUCTOR_CACHE_DIR if set, else "
        "torch_compile in this engine's cache folder.",
        metavar="DIR",
    )
    cpu_threads: int | None = flag(
        None,
        "Compute threads on a CPU. Left out: the cores this process may use (affinity and container quota).",
        metavar="N",
    )
