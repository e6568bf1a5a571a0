"""Flags of SGLang that need nothing here, flags that SGLang has dropped, and flags of other programs.

`SATISFIED` switches turn off something that this engine does not do: they are accepted and noted. `DROPPED` flags are
accepted with the value they had when left out, else the message names what replaced them.
"""

from __future__ import annotations

from moe_engine.config.absent_flag import SWITCH, DroppedFlag

SATISFIED: dict[str, str] = {
    "disable_outlines_disk_cache": "there is no grammar cache",
    "disable_fast_image_processor": "there is no image processor: prompts are text",
    "disable_piecewise_cuda_graph": "prompts run without CUDA graphs",
    "skip_server_warmup": "the server sends itself no request: kernels are warm before it listens",
    "show_time_cost": "the log always says how long the parts of a start took",
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
    DroppedFlag(
        "enable_nan_detection", SWITCH, "leave it out: logits that are not numbers always end their request with a 500"
    ),
    DroppedFlag("file_storage_pth", "sglang_storage", "leave it out: there is no files API"),
    DroppedFlag("debug_tensor_dump_inject", SWITCH, "leave it out: no tensors are dumped"),
    DroppedFlag("num_continuous_decode_steps", 1, "leave it out: SGLang never read it either"),
)
DROPPED: dict[str, DroppedFlag] = {row.name: row for row in _DROPPED}

_DOCKER = "a flag of `docker run`, not of the server"
FOREIGN: dict[str, str] = dict.fromkeys(("shm_size", "gpus", "ipc", "ulimit", "runtime", "privileged"), _DOCKER)
"""Flags of other programs that commands copied from guides hold beside the server's."""
