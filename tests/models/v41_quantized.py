"""V4.1 checkpoints in the published form: block FP8, experts in FP4, tables of n-grams in FP8; random codes, and their
values by the definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.v4_quantized import Drawn, random_fp4, random_fp8, write_copies

SECTION: dict[str, Any] = {
    "activation_scheme": "dynamic", "expert_dtype": "fp4", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
}  # fmt: skip
PLAIN_PARTS = (
    "compressor", "indexer.wk.", "weights_proj", "norm", "gate.", "head.", "hc_", "attn_sink", "vision", "aligner",
    "q_weight", "k_weight",
)  # fmt: skip
"""Parts of the published names of tensors that are not quantized."""
WIDTHS: dict[str, Any] = {
    "hidden_size": 96, "moe_intermediate_size": 64, "engram_head_dim": 32,
}  # fmt: skip
"""Fields of config.json with which all quantized matrices have blocks."""
TABLE = ".engram.embed.weight"


def quantized_v41(source: Path, directory: Path) -> tuple[Path, Path]:
    """The checkpoint with random quantized weights, and one with their values."""

    def draw(name: str, rows: int, cols: int) -> Drawn | None:
        if any(part in name for part in PLAIN_PARTS) or name == "embed.weight":
            return None
        if ".experts." in name and not name.endswith(TABLE):
            return random_fp4(rows, cols)
        return random_fp8(rows, cols, (1, 32) if name.endswith(TABLE) else (32, 32))

    return write_copies(source, directory, {"quantization_config": SECTION}, draw)
