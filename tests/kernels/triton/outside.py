"""Functions that must run outside the interpreter, as a process: ``python -m tests.kernels.triton.outside NAME CACHE``.

Each function prints one JSON value.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_suite.engine_points import V2_LITE, V3_LAYERS
from moe_engine.cli.compile_kernels.exercise import exercise
from moe_engine.cli.compile_kernels.other_rows import build_triton
from moe_engine.config.args import EngineArgs
from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.experts.triton_experts import TritonExperts
from moe_engine.kernels.kv_format.formats import PLAIN
from moe_engine.kernels.linear import triton_heads
from moe_engine.kernels.ops import (
    triton_absorb,
    triton_lookup,
    triton_norm,
    triton_norm_route,
    triton_rotary,
    triton_router,
    triton_streams,
)
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.ops.streams import StreamWeights
from moe_engine.kernels.ops.triton_ops import TritonOps
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat
from moe_engine.kernels.sampling import triton_sampling
from moe_engine.kernels.sampling.protocol import SamplingParameters
from moe_engine.kernels.triton import guard
from moe_engine.kernels.triton.absent_device import absent_device, listed
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.vendors.warming import StepShapes
from moe_engine.kernels.warmup_sizes import StepSize
from moe_engine.planning.prepare import prepare
from moe_engine.tuning.hardware.table import find_gpu
from tests.examples import FACTOR
from tests.kernels.triton.cache_keys import difference, there

ARCH = 90

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu", "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None, "attention_bias": False,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip


def launch(count: int) -> None:
    """The small operations of a DeepSeek-V3 layer and the sampling of its logits, for `count` tokens."""
    ops, sampling = TritonOps(), triton_sampling.TritonSampling()
    positions, slots = there(3 * count + 1, dtype=torch.int64)[1:].split(count)[:2]  # slices of one upload
    table = RotaryTable(there(4096, 64, dtype=torch.float32), True)
    hidden, projected = there(count, 7168), there(count, 2112)
    ops.rms_norm(hidden, there(7168), 1e-6)
    ops.rms_norm(projected[:, :1536], there(1536), 1e-6)
    ops.add_rms_norm(hidden, there(count, 7168), there(7168), 1e-6)
    ops.silu_and_mul(there(count, 4096))
    ops.rotate(there(count, 128, 192), positions, table)
    q, keys, norm = there(count, 128, 192), there(128, 512, 128), there(512, dtype=torch.float32)
    triton_absorb.absorb(q, keys, projected[:, 1536:], norm, 1e-6, positions, table, slots, there(900, 576))
    triton_heads.heads_quantized(there(count, 128, 512), there(128, 128, 512))
    ops.write_latent(projected[:, 1536:], there(512), 1e-6, positions, table, slots, there(900, 576))
    ops.route(hidden, there(256, 7168, dtype=torch.float32), there(256, dtype=torch.float32), triton_router.V3)
    gate, bias, real = there(256, 7168), there(256, dtype=torch.float32), there(count + 1, dtype=torch.int32)[1:]
    fp8, stream = ActivationFormat(True, True, True), there(count, 7168)
    norm = there(7168, dtype=torch.float32)
    ops.add_norm_route(fp8, hidden, stream, norm, 1e-6, gate, bias, triton_router.V3, real, True)
    ops.capabilities.lookup(positions, there(16160, 7168), 16160)  # type: ignore[misc]
    streams, residual = stream_weights(24, 4096), there(count, 4 * 4096 + 20)
    ops.capabilities.mix_streams(None, residual, streams)
    ops.capabilities.mix_streams(there(count, 4096), residual, streams)
    for format in (UNQUANTIZED, fp8):
        triton_streams.mix_norm(None, residual, streams, format, there(4096, dtype=torch.float32), 1e-6)
    narrow = [there(4 * count + 1, dtype=torch.float32)[1:].split(count)[n] for n in range(4)]
    top_k = there(2 * count, dtype=torch.int64)[count:]
    parameters = SamplingParameters(None, *narrow[:3], top_k, True)  # type: ignore[arg-type]
    logits = there(count, 129280, dtype=torch.float32)
    sampling.greedy(logits)
    sampling.greedy(there(count, 129280))
    sampling.sample(logits, parameters, narrow[3])
    sampling.probabilities(logits, parameters, there(count, 1, dtype=torch.int64))


def stream_weights(numbers: int, width: int) -> StreamWeights:
    """Of four streams, as in DeepSeek V4."""
    fn, *rest = (there(*shape, dtype=torch.float32) for shape in ((numbers, 4 * width), (numbers,), (numbers,)))
    return StreamWeights(fn, *rest, 4, 20, 1e-6, 1e-6)


def expected() -> list[AotCase]:
    """The cases of `launch(1)` to `launch(16)`."""
    bf16, int64 = torch.bfloat16, torch.int64
    return [
        triton_lookup.aot_cases()[0],
        triton_norm.norm_case("v3", 7168, 1, False),
        triton_norm.norm_case("v3", 1536, 1, False),
        triton_norm.norm_case("v3", 7168, 1, True),
        triton_norm.silu_case("v3", 2048),
        triton_rotary.rotate_case("v3", 128, 64, True),
        triton_rotary.latent_case("v3", 512, 64, bf16, int64),
        triton_absorb.absorb_case("v3", 128, 16, PLAIN),
        triton_heads.heads_case("v3", 128, 16, False),
        *triton_router.route_cases("v3", 7168, triton_router.V3, 1, bf16),
        *triton_norm_route.norm_route_cases(
            "v3", 7168, triton_router.V3, 1, ActivationFormat(True, True, True), has_real=True, ids_dtype=int64
        ),
        *(case for case in triton_streams.aot_cases() if "v4_flash_24_bf16" in case.name),
        *(case for case in triton_sampling.vocabulary_cases("v3", 129280) if "look_up_16" not in case.name),
    ]


def agreement(cache: str) -> Any:
    """Odd counts of tokens, counts of one, multiples of 16: all must use the same kernels."""
    return difference(expected(), lambda: [launch(count) for count in (1, 2, 3, 8, 16)], ARCH)


def guarding(cache: str) -> Any:
    """Counts of the guard after a warm-up, after the same launches again, and after a launch that was not warmed up."""
    counts = []
    guard.watch()
    guard.watch()  # a second call changes nothing
    with absent_device(ARCH, cache):
        ops, weight = TritonOps(), there(2048)
        ops.rms_norm(there(4, 2048), weight, 1e-6)
        guard.ready()
        counts.append(guard.compilations_after_ready())
        ops.rms_norm(there(7, 2048), weight, 1e-6)
        counts.append(guard.compilations_after_ready())
        ops.add_rms_norm(there(7, 2048), there(7, 2048), weight, 1e-6)
        counts.append(guard.compilations_after_ready())
    return counts


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "v3 on 8 ranks": (V3_LAYERS, {"tp_size": 8, "ep_size": 8}),
    "v2-lite, one head, fp8 cache": (V2_LITE, {"tp_size": 16, "kv_cache_dtype": "fp8_e4m3"}),
    "qwen3": (QWEN3_MOE, {}),
}


def reachable(cache: str) -> Any:
    """For each model: the number and the names of the kernels of the ladder of steps, the additional kernels of further
    steps of the plan, and those in addition to a ladder of its two ends."""
    found = {}
    for name, (config, flags) in MODELS.items():
        folder = Path(cache, name)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        target = find_gpu("h200")
        args = EngineArgs.from_kwargs(
            model_path=str(folder), load_format="dummy", device="cuda", max_running_requests=200, context_length=4096,
            chunked_prefill_size=1500, **flags,
        )  # fmt: skip
        launch = prepare(args, target.machine())
        backends = build_triton(launch.kernels.model.choices)
        sparse = 1 if FACTOR > 1 else 3
        others = [StepSize(0, 1, 0, tokens) for tokens in (*range(1, 100, 3 * sparse), *range(100, 1500, 67 * sparse))]
        others += [StepSize(decodes, 1, 777) for decodes in range(1, 200, 13 * sparse)]
        others += [StepSize(decodes, 4, 99) for decodes in range(1, 50, 9 * sparse)]
        others += [StepSize(1, tokens, 1000 + tokens) for tokens in range(1, 170, 11 * sparse)]
        others += [StepSize(7, 1, 50, tokens, 64) for tokens in range(5, 500, 81 * sparse)]
        needed = []
        for sizes in (None, others, [StepSize(1, 1, 777), StepSize(0, 1, 0, 1500, 99)]):
            with listed(ARCH) as kernels:
                for _ in exercise(launch, backends, sizes):
                    pass
            needed.append(kernels)
        missing = (sorted({kernel for kernel, _ in needed[1] - warm}) for warm in (needed[0], needed[2]))
        found[name] = len(needed[0]), sorted({kernel for kernel, _ in needed[0]}), *missing
    return found


def dispatched(cache: str) -> Any:
    """For experts with dispatched rows: kernels of `warm_up`, additional kernels of further batches, and those without
    `warm_up`."""
    found = []
    for fp8 in (False, True):
        kernel = TritonExperts()
        shape = (16, 2048, 1408)
        weights = kernel.allocate_blocks(*shape, "meta") if fp8 else kernel.allocate(*shape, torch.bfloat16, "meta")
        with listed(ARCH) as warm:
            runs = kernel.warm_up(StepShapes(1, 4000, 64, dispatched=True))
            assert kernel.warm_up(StepShapes(1, 4000, 64)) == 0
        with listed(ARCH) as needed:
            for count in range(1, 4000, 97):
                kernel.run(ExpertBatch("grouped", there(count, 2048), offsets=there(17, dtype=torch.int32)), weights)
            for mean in range(65):
                batch = ExpertBatch("padded", there(16, 64, 2048), counts=there(16, dtype=torch.int32), mean_rows=mean)
                kernel.run(batch, weights)
        found.append((runs, len(warm), len(needed), len(needed - warm)))
    return found


NAMES: dict[str, Callable[[str], Any]] = {
    "agreement": agreement, "guarding": guarding, "reachable": reachable, "dispatched": dispatched,
}  # fmt: skip


def main() -> None:
    print(json.dumps(NAMES[sys.argv[1]](sys.argv[2])))


if __name__ == "__main__":
    main()
