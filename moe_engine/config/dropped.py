"""Flags of SGLang without effect here, flags that SGLang has removed, and flags of other programs.

`SATISFIED` switches disable a feature that this engine does not have: they are accepted with a remark. `DROPPED` flags
are accepted with their old default; for other values the error names the replacement.
"""

from __future__ import annotations

from moe_engine.config.absent_flag import SWITCH, DroppedFlag

SATISFIED: dict[str, str] = {
    "disable_outlines_disk_cache": "there is no grammar cache",
    "disable_fast_image_processor": "there is no image processor: prompts are text",
    "disable_piecewise_cuda_graph": "prefill runs without CUDA graphs",
    "skip_server_warmup": "the server sends itself no warm-up request: kernels are warmed up before it listens",
    "show_time_cost": "the log always shows the time of each startup phase",
    "disable_shared_experts_fusion": "shared experts are never fused into the routed ones",
}

_NO_SPARSITY = "leave it out: there is no Double Sparsity attention"

_DROPPED = (
    DroppedFlag("prefill_only_one_req", SWITCH, "use --prefill-max-requests 1"),
    DroppedFlag("disable_jump_forward", SWITCH, "leave it out: there is no jump-forward decoding"),
    DroppedFlag("disable_mla", SWITCH, "leave it out: DeepSeek models always use their latent KV cache"),
    DroppedFlag("enable_flashinfer_mla", SWITCH, "use --attention-backend flashinfer"),
    DroppedFlag("enable_flashmla", SWITCH, "use --attention-backend flashmla"),
    DroppedFlag("n_share_experts_fusion", 0, "leave it out: shared experts are never fused into the routed ones"),
    DroppedFlag("enable_double_sparsity", SWITCH, _NO_SPARSITY),
    DroppedFlag("ds_channel_config_path", None, _NO_SPARSITY),
    DroppedFlag("ds_heavy_channel_num", 32, _NO_SPARSITY),
    DroppedFlag("ds_heavy_token_num", 256, _NO_SPARSITY),
    DroppedFlag("ds_heavy_channel_type", "qk", _NO_SPARSITY),
    DroppedFlag("ds_sparse_decode_threshold", 4096, _NO_SPARSITY),
    DroppedFlag("torchao_config", "", "leave it out: weights are quantised in the checkpoint (--quantization)"),
    DroppedFlag("enable_nan_detection", SWITCH, "leave it out: a request with NaN logits always ends with status 500"),
    DroppedFlag("file_storage_pth", "sglang_storage", "leave it out: there is no files API"),
    DroppedFlag("debug_tensor_dump_inject", SWITCH, "leave it out: no tensors are dumped"),
    DroppedFlag("num_continuous_decode_steps", 1, "leave it out: SGLang never read it either"),
)
DROPPED: dict[str, DroppedFlag] = {row.name: row for row in _DROPPED}

_DOCKER = "a flag of `docker run`, not of the server"
FOREIGN: dict[str, str] = dict.fromkeys(("shm_size", "gpus", "ipc", "ulimit", "runtime", "privileged"), _DOCKER)
"""Flags of other programs, which users copy from guides together with the server's flags."""
