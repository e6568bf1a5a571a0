"""Tokens per second of the whole engine with random weights: decode of one batch, many requests offline, FP8 layers.

Models are only a config.json; weight values do not affect speed.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_suite.clock import Clock
from benchmarks.gpu_suite.floors import decode_bytes
from benchmarks.gpu_suite.setting import Setting
from benchmarks.gpu_suite.targets import check_engine
from moe_engine.models.config_file import load_model_config
from moe_engine.processes.child import end_with_parent

if TYPE_CHECKING:
    from moe_engine import Engine

V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "moe_layer_freq": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax", "hidden_act": "silu",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": None,
    "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 100000,
    "eos_token_id": 100001,
}  # fmt: skip

V3_LAYERS: dict[str, Any] = V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 5, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "num_nextn_predict_layers": 0,
    "bos_token_id": 0, "eos_token_id": 1,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip
"""One dense and four MoE layers of DeepSeek-V3 in block FP8: about 47 GB."""

TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 8, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "qk_nope_head_dim": 32, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""Config overrides of a dry run: a CPU-sized model."""


OnPoints = Callable[[list[dict[str, Any]]], None]
POLL_S = 0.5


@dataclass(frozen=True)
class Load:
    """Sizes of the measurements."""

    decode_batches: tuple[int, ...] = (1, 32, 128, 256)
    layer_batches: tuple[int, ...] = (1, 64, 128)
    context: int = 2048
    decode_tokens: int = 24
    offline_requests: int = 512
    offline_tokens: int = 1024
    flags: tuple[tuple[str, int], ...] = ()
    """Additional engine flags."""


FULL, SMALL = Load(), Load((1, 3), (1, 2), 16, 3, 4, 8, (("chunked_prefill_size", 16), ("max_total_tokens", 256)))


def load_of(setting: Setting) -> Load:
    return SMALL if setting.dry else FULL


def model_of(config: dict[str, Any], folder: Path, setting: Setting) -> Path:
    """The model's folder; a dry run's model is tiny."""
    return write_model(folder / config["model_type"], config | TINY if setting.dry else config)


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint folder with only a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def decode_points(
    model: Path, batches: tuple[int, ...], folder: Path, setting: Setting, on_points: OnPoints
) -> list[dict[str, Any]]:
    """Runs `benchmarks.one_batch` with `Load.context` tokens of context, one result per batch size; `on_points`
    receives the results so far after each.

    Raises:
        RuntimeError: one_batch failed; its earlier results were reported.
    """
    load, results = load_of(setting), folder / f"{model.name}.jsonl"
    command = [
        sys.executable, "-m", "benchmarks.one_batch", "--model-path", str(model), "--load-format", "dummy",
        "--skip-tokenizer-init", "--device", setting.kind, "--context-length", str(2 * load.context),
        "--max-running-requests", str(max(batches)), "--batch-size", *map(str, batches),
        "--input-len", str(load.context), "--output-len", str(load.decode_tokens), "--result-filename", str(results),
        *(word for name, value in load.flags for word in (f"--{name.replace('_', '-')}", str(value))),
    ]  # fmt: skip
    points: list[dict[str, Any]] = []
    with (folder / "one_batch.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, preexec_fn=end_with_parent)
        code = None
        while code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(POLL_S)
            lines = results.read_text().split("\n")[:-1] if results.exists() else []
            if len(lines) > len(points):
                points = [json.loads(line) for line in lines]
                on_points(points)
        if code:
            log.seek(0)
            raise RuntimeError(f"one_batch ended with {code}: {log.read()[-1500:]}")
    return points


def offline(model: Path, setting: Setting) -> dict[str, Any]:
    """Generated tokens per second of random prompts submitted at once, with equal input and output lengths. Unfinished
    requests are aborted at the time limit: the tokens and seconds until then count. Saved before the engine ends."""
    from moe_engine import Engine

    load, draw = load_of(setting), random.Random(0)
    requests, tokens = load.offline_requests, load.offline_tokens
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    prompts = [[draw.randrange(2, vocab) for _ in range(tokens)] for _ in range(requests)]
    ask = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    flags: dict[str, Any] = dict(load.flags) | {
        "model_path": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "device": setting.kind,
    }  # fmt: skip
    with Engine(**flags, context_length=2 * tokens + 64, max_running_requests=requests) as engine:
        engine.generate(input_ids=prompts[:4], sampling_params=ask | {"max_new_tokens": 8})
        engine.flush_cache()
        with _aborting(engine, setting):
            began = time.perf_counter()
            answers = engine.generate(input_ids=prompts, sampling_params=ask)
            seconds = time.perf_counter() - began
        assert isinstance(answers, list)
        made = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
        targets = [target for target in check_engine({"offline": made / seconds}) if "offline" in target["name"]]
        values = {"output_tokens_per_s": made / seconds, "tokens": made, "of_tokens": requests * tokens}
        setting.save(values | {"targets": targets})
    return values | {"targets": targets}


@contextlib.contextmanager
def _aborting(engine: Engine, setting: Setting) -> Iterator[None]:
    """Aborts all requests at the time limit; repeatedly, since some may arrive just after."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            if setting.is_over:
                engine.abort_request(abort_all=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def measure_decode(folder: Path, setting: Setting) -> dict[str, Any]:
    """DeepSeek-V2-Lite's decode points."""

    def values(points: list[dict[str, Any]]) -> dict[str, Any]:
        rates = {f"decode.b{p['batch_size']}": p["batch_size"] / p["median_decode_latency"] for p in points}
        return {"points": points, "targets": [t for t in check_engine(rates) if "decode" in t["name"]]}

    model, batches = model_of(V2_LITE, folder, setting), load_of(setting).decode_batches
    return values(decode_points(model, batches, folder, setting, lambda points: setting.save(values(points))))


def measure_offline(folder: Path, setting: Setting) -> dict[str, Any]:
    """DeepSeek-V2-Lite, 1K in and 1K out."""
    return offline(model_of(V2_LITE, folder, setting), setting)


def measure_fp8_layers(folder: Path, setting: Setting) -> dict[str, Any]:
    """The FP8 layers of DeepSeek-V3: time per layer against the bytes that a step must read, at this GPU's copy rate.
    (Both include a fifth of the head per layer.)"""
    load, model = load_of(setting), model_of(V3_LAYERS, folder, setting)
    rate, config = Clock(setting.kind, setting.dry).copy_bytes_per_s(), load_model_config(model)
    if setting.kind == "cuda":
        torch.cuda.empty_cache()  # frees memory for the engine process

    def values(points: list[dict[str, Any]]) -> dict[str, Any]:
        for point in points:
            floor = decode_bytes(config, point["batch_size"], load.context) / rate
            seconds = point["median_decode_latency"]
            point["layer_us"], point["layer_floor_us"] = (s / config.num_layers * 1e6 for s in (seconds, floor))
            point["of_floor"] = floor / seconds
        return {"points": points}

    points = decode_points(model, load.layer_batches, folder, setting, lambda points: setting.save(values(points)))
    return values(points)
