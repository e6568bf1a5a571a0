"""Flags of the model, its checkpoint and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.config.values import parse_count, parse_json_object

OTHER_FORMATS = "other checkpoint formats"
CHECKPOINTS = (
    "compressed-tensors", "awq", "gptq", "moe_wna16", "mxfp4", "w8a8_int8", "w8a8_fp8", "fbgemm_fp8", "modelopt",
    "mxfp8", "bitsandbytes", "gguf", "auto-round",
)  # fmt: skip
"""Formats of checkpoints other than fp8; moe_wna16: awq or gptq."""
TORCHAO = ("int4wo-32", "int4wo-64", "int4wo-128", "int4wo-256", "int8wo", "int8dq", "fp8wo")
OTHER_QUANTIZATION = "other quantization schemes"


@dataclass(frozen=True)
class ModelArgs:
    model_path: str | None = flag(
        None,
        "Folder of the checkpoint (config.json, *.safetensors, tokenizer.json), a GGUF file, or a hub id such as "
        "deepseek-ai/DeepSeek-V2-Lite. Left out: the small model embedded in this package.",
        aliases=("--model",),
        metavar="PATH",
    )
    tokenizer_path: str | None = flag(
        None, "Folder or hub id of the tokenizer. Left out: the model's own.", metavar="PATH"
    )
    tokenizer_mode: str = flag(
        "auto", "auto: the fast tokenizer if the model has one; slow: the Python tokenizer.", choices=("auto", "slow")
    )
    skip_tokenizer_init: bool = flag(
        False, "Load no tokenizer: clients send input_ids and read output_ids; requests with text are refused."
    )
    load_format: str = flag(
        "auto",
        "auto: *.safetensors, else files of torch.save (*.bin, *.pt), else a GGUF file; safetensors, pt, gguf: only "
        "this format. layered: like auto; every load takes one layer at a time. dummy fills the weights with random "
        "values (for benchmarks).",
        choices=("auto", "safetensors", "pt", "gguf", "layered", "dummy"),
        unsupported=dict.fromkeys(
            ("npcache", "sharded_state", "bitsandbytes", "remote", "presharded", "mistral",
             "fastsafetensors", "runai_streamer", "remote_instance", "flash_rl", "instanttensor",
             "expert_pack", "private"),
            OTHER_FORMATS,
        ),
    )  # fmt: skip
    delete_ckpt_after_loading: bool = flag(
        False,
        "Delete the weight files of --model-path when all ranks have loaded them, on this machine; config and "
        "tokenizer stay. Weights can then only be updated from another folder, or over the network.",
    )
    weight_loader_prefetch_checkpoints: bool = flag(
        False,
        "Threads of each rank read the weight files into the page cache ahead of the loader, at most 2 GiB; the "
        "ranks of a machine read different parts. For files on NFS or Lustre. Left out: a single rank reads ahead "
        "with one thread, several ranks do not.",
    )
    weight_loader_prefetch_num_threads: int = flag(
        4, "Threads of each rank with --weight-loader-prefetch-checkpoints.", parse=parse_count, metavar="THREADS"
    )
    model_loader_extra_config: str = flag(
        "{}",
        'JSON object. {"enable_multithread_load": true, "num_threads": N} means '
        "--weight-loader-prefetch-checkpoints with N threads (8 if left out). Other settings are refused.",
        parse=parse_json_object,
        metavar="JSON",
    )
    weight_loader_drop_cache_after_load: bool = flag(
        False,
        "Remove the weight files of --model-path from the page cache when a rank has loaded them: their pages no "
        "longer count as memory in use, and a restart reads the disk.",
    )
    is_embedding: bool = flag(
        False,
        "Serve vectors instead of text: /v1/embeddings, /encode, /classify. Pooling and normalization follow "
        "sentence-transformers' files of the checkpoint (modules.json); without them the last token's state, "
        "normalized. Checkpoints of classification and reward models need no flag.",
    )
    trust_remote_code: bool = flag(
        False, "Allow the tokenizer to run Python code of the checkpoint. Model code of a checkpoint never runs."
    )
    dtype: str = flag(
        "auto",
        "Data type of weights and activations. auto: the checkpoint's (bfloat16 or float32 on a CPU, where a "
        "float16 checkpoint becomes bfloat16; float32 becomes float16 on a GPU, as in SGLang). half is float16, "
        "float is float32.",
        choices=("auto", "float16", "bfloat16", "float32"),
        synonyms={"half": "float16", "float": "float32"},
    )
    quantization: str | None = flag(
        None,
        "Format of the weights. Left out: from config.json. For a checkpoint that is not quantized: int4, int8, fp8 or "
        "a name of torchao's, and weights are quantized while loading. Kernels that multiply a format keep it; others "
        "get the values of the quantized weights.",
        choices=("fp8", "int8", "int4", *TORCHAO, *CHECKPOINTS),
        synonyms={
            "awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp8": "modelopt", "modelopt_fp4": "modelopt",
        },
        unsupported=dict.fromkeys(
            ("marlin", "modelopt_mixed",
             "nvfp4_online", "w4afp8", "quark", "quark_mxfp4", "qoq",
             "petit_nvfp4", "auto-round-int8", "modelslim", "mxfp_w4a8", "quark_int4fp8_moe", "mlx_q4", "mlx_q8",
             "humming"),
            OTHER_QUANTIZATION,
        ),
    )  # fmt: skip
    torchao_config: str = flag(
        "",
        "SGLang's flag for torchao's names of --quantization: int4wo-128 (a scale per 128 columns), int8wo, fp8wo. "
        "int8dq is served as int8wo: activations are not quantized.",
        choices=("", *TORCHAO),
        unsupported=dict.fromkeys(("fp8dq-per_tensor", "fp8dq-per_row"), "quantized activations of plain checkpoints"),
    )
    context_length: int | None = flag(
        None,
        "Max length of prompt plus answer, in tokens. Left out: from config.json. A smaller value saves memory of the "
        "block table and, on a CPU, of the KV cache.",
        parse=parse_count,
        metavar="TOKENS",
    )
    device: str | None = flag(
        None,
        "cpu or cuda. Left out: cuda if torch can use one, else cpu.",
        choices=("cpu", "cuda"),
        unsupported=dict.fromkeys(("xpu", "hpu", "npu", "musa", "mps"), "other accelerators"),
    )
    served_model_name: str | None = flag(
        None, "Name of the model in /v1/models and in answers. Left out: the model path.", metavar="NAME"
    )
    chat_template: str | None = flag(
        None,
        "File with a Jinja chat template (or JSON with a `chat_template`), the template itself, or a built-in one: "
        "`deepseek-v32`, `deepseek-v4`, `deepseek-v41`, `kimi-k3`, `gme-qwen2-vl`. Left out: the tokenizer's own; for "
        "DeepSeek V3.2, V4 and V4.1 and Kimi K3 without a template of their own, the built-in one.",
        metavar="FILE",
    )
    revision: str | None = flag(None, "Branch, tag or commit of a hub model.", metavar="REV")
    download_dir: str | None = flag(None, "Download folder of hub models. Left out: the hub's cache.", metavar="DIR")
    json_model_override_args: str = flag(
        "{}",
        "JSON object that replaces values of config.json, for instance '{\"max_position_embeddings\": 8192}'.",
        parse=parse_json_object,
        metavar="JSON",
    )
    random_seed: int | None = flag(
        None, "Seed of sampling and of dummy weights. Left out: drawn at start and printed.", metavar="SEED"
    )
