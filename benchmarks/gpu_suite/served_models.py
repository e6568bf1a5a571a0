"""Launches of published models in production sizes on an absent H200: what a served model asks of Triton's rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu_suite.engine_points import write_model
from benchmarks.step_costs.models import MODELS, shortened
from moe_engine.cli.compile_kernels.exercise import exercise
from moe_engine.cli.compile_kernels.other_rows import build_triton
from moe_engine.config.args import EngineArgs
from moe_engine.kernels.warmup_sizes import StepSize
from moe_engine.models.config_file import load_model_config
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.tuning.hardware.table import find_gpu
from tests.models import published


def _kimi_k3(layers: int = 14) -> dict[str, Any]:
    """Its first layers: one block of the residual, and the next."""
    text = published.KIMI_K3["text_config"]
    mixers = text["linear_attn_config"]
    kept = {name: [i for i in mixers[name] if i <= layers] for name in ("full_attn_layers", "kda_layers")}
    text = text | {"num_hidden_layers": layers, "linear_attn_config": mixers | kept}
    return published.KIMI_K3 | {"text_config": text}


PUBLISHED = {
    **{name: shortened(fields)[0] for name, fields in MODELS.items()}, "glm-5.2": published.GLM_5_2,
    "qwen3.8": published.QWEN3_8, "kimi-linear": published.KIMI_LINEAR, "nemotron-3": published.NEMOTRON_3_NANO,
    "ling-flash": published.LING_FLASH, "longcat-flash": published.LONGCAT_FLASH,
    "qwen-3.8-flash-next": published.QWEN_3_8_FLASH_NEXT, "kimi-k3": _kimi_k3(),
    "llama-4-scout": published.LLAMA_4_SCOUT, "k-exaone": published.K_EXAONE, "flint": published.FLINT,
    "axk1": published.AXK1, "command-a-plus": published.COMMAND_A_PLUS, "gemma-2": published.GEMMA_2_9B,
    "granite-swa": published.GRANITE_SWA, "lfm2-8b-a1b": published.LFM2_8B_A1B,
}  # fmt: skip
for _name in ("v4-flash", "v4-pro", "glm-4.6", "glm-5.3-flash"):
    PUBLISHED[_name] = PUBLISHED[_name] | {"num_nextn_predict_layers": 1}
PUBLISHED["minimax-m3"] = PUBLISHED["minimax-m3"] | {"num_mtp_modules": 1}
_TREES = ("v3", "v3-row-fp8", "glm-4.6", "longcat-flash")
"""Models with an MTP layer whose attention takes trees."""
_RANKS = {"tp_size": 8, "attn_dp_size": 8, "ep_size": 8}
_DRAFTS = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}
FORMS: dict[str, dict[str, Any]] = {
    "tp1": {}, "dp8ep8": _RANKS, "symm_mem": _RANKS | {"moe_a2a_backend": "symm_mem"},
    "fp8_kv": {"kv_cache_dtype": "fp8_e4m3"},
    "mtp": _DRAFTS | {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
    "tree": _DRAFTS | {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8},
}  # fmt: skip
"""Flags. The most heads of a rank, the most tokens of the experts; this project's exchange; and what changes attention.
`forms_of` has those of a model."""
REQUESTS, CHUNK, CONTEXT = 256, 32768, 1 << 20
ENOUGH_BYTES = 10**13
"""For the weights and the KV of each model: offsets do not depend on what fits."""
STEPS = (
    StepSize(REQUESTS, 1, 4096), StepSize(REQUESTS, 4, 4096), StepSize(1, 1, CONTEXT), StepSize(0, 1, 0, CHUNK),
    StepSize(0, 1, 0, CHUNK // 2, CONTEXT // 2), StepSize(7, 1, 50, 300, 64),
)  # fmt: skip


def forms_of(model: str) -> list[str]:
    """The names in `FORMS` that the model can be served in."""
    with TemporaryDirectory() as folder:
        config = load_model_config(write_model(Path(folder) / "model", PUBLISHED[model]))
    has = {
        "symm_mem": config.is_moe, "fp8_kv": config.streams is None, "mtp": config.num_nextn_predict_layers > 0,
        "tree": model in _TREES,
    }  # fmt: skip
    return [form for form in FORMS if has.get(form, True)]


def launch_of(folder: Path, model: str, form: str) -> ResolvedConfig:
    """The launch of a model on Triton's rows."""
    fields = PUBLISHED[model]
    text = fields.get("text_config", fields)
    longest = min(CONTEXT, text.get("max_position_embeddings", CONTEXT))
    args = EngineArgs.from_kwargs(
        model_path=str(write_model(folder / "model", fields)), load_format="dummy", device="cuda",
        max_running_requests=REQUESTS, chunked_prefill_size=CHUNK, context_length=longest, **FORMS[form],
    )  # fmt: skip
    return prepare(args, replace(find_gpu("h200"), memory_bytes=ENOUGH_BYTES).machine())


def run_steps(config: ResolvedConfig) -> None:
    """`STEPS`, within the longest context, on the absent device of the caller."""
    most = config.context_len
    found = [replace(size, context=min(size.context, most), prefill=min(size.prefill, most)) for size in STEPS]
    sizes = [replace(size, prefix=min(size.prefix, most - size.prefill)) for size in found]
    for _ in exercise(config, build_triton(config.kernels.model.choices), sizes):
        pass
