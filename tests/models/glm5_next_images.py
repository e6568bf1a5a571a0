"""A tiny random checkpoint of GLM-5.3-Flash with its tower, tokenizer, chat template and image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import POOLED, make_checkpoint
from tests.models.vision_checkpoints import END, IMAGE, MERGE, PATCH, START, TEMPLATE, VIDEO, Made, Pixels

TOKENS = {
    "image_start_token_id": START, "image_token_id": IMAGE, "image_end_token_id": END, "video_token_id": VIDEO,
    "video_start_token_id": 280, "video_end_token_id": 281,
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "Glm5NextImageProcessor", "patch_size": PATCH, "merge_size": MERGE,
    "temporal_patch_size": 2, "min_image_tokens": 4, "max_image_tokens": 30,
}  # fmt: skip


class GlmOracle(Made):
    def image_inputs(self, ids: list[int], images: list[Pixels]) -> dict[str, Any]:
        return {
            "pixel_values": torch.cat([image.values for image in images]),
            "image_grid_thw": torch.tensor([image.grid for image in images]),
        }


def picture(rows: int, columns: int) -> Pixels:
    """Of rows x columns tokens."""
    grid = (1, rows * MERGE, columns * MERGE)
    return Pixels(grid, torch.randn(grid[1] * grid[2], 3 * 2 * PATCH**2))


def make_glm(path: Path, seed: int, vision: dict[str, Any] | None = None, **text: Any) -> GlmOracle:
    """Writes the checkpoint. `vision`: fields of the tower; `text`: of the text model."""
    import transformers

    make_checkpoint(POOLED, path, seed, vision=vision or {}, **text)
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if "visual" in name:
            drawn = torch.randn(tensor.shape, generator=generator)
            tensors[name] = 1 + 0.2 * drawn if "norm" in name and name.endswith("weight") else 0.2 * drawn
    tensors["lm_head.weight"][START : END + 1] = 0  # no answer has a placeholder
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | TOKENS))
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return GlmOracle(path, transformers.Glm5NextForConditionalGeneration.from_pretrained(path, **options).eval())
