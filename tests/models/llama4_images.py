"""A tiny random checkpoint of Llama 4 with its tower, tokenizer, chat template and image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.models.byte_tokenizer import BOS, EOS, write_tokenizer
from tests.models.checkpoints import hub_fields
from tests.models.vision_checkpoints import Made, Pixels, name_tokens

START, END, ACROSS, DOWN, IMAGE, PATCH_TOKEN = 270, 271, 274, 275, 280, 282
"""At the distances of the published vocabulary from each other."""
NAMES = {
    START: "<|image_start|>", END: "<|image_end|>", ACROSS: "<|tile_x_separator|>", DOWN: "<|tile_y_separator|>",
    IMAGE: "<|image|>", PATCH_TOKEN: "<|patch|>",
}  # fmt: skip
PATCH, SIDE, MERGE = 4, 4, 2
"""Pixels of a patch, patches of a tile and of a token, in one direction."""
VISION = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24 * MERGE**2,
    "image_size": SIDE * PATCH, "patch_size": PATCH, "pixel_shuffle_ratio": 1 / MERGE, "vision_output_dim": 40,
    "projector_input_dim": 40, "projector_output_dim": 40, "rope_theta": 10000.0,
}  # fmt: skip
MOST = 6
"""Tiles of an image, beside that of the whole."""


def tokens_of(grid: tuple[int, int, int], side: int, merge: int) -> list[int]:
    """The tokens of an image of tiles of side x side patches, as transformers' processor writes them."""
    rows, columns = (count // side for count in grid[1:])
    tile = [PATCH_TOKEN] * (side // merge) ** 2
    line = [*([*tile, ACROSS] * columns)[:-1], DOWN]
    return [*line * (rows if rows * columns > 1 else 0), IMAGE, *tile]


class TilePixels(Pixels):
    """Tiles by row, then one of the whole image if they are several; the grid has the patches of the former."""

    @property
    def num_tokens(self) -> int:
        return len(self.placeholders(IMAGE))

    def placeholders(self, image: int) -> list[int]:
        return tokens_of(self.grid, SIDE, MERGE)


class Llama4Oracle(Made):
    def image_inputs(self, ids: list[int], images: list[Pixels]) -> dict[str, Any]:
        vision = self.model.config.vision_config
        side = vision.image_size // vision.patch_size
        parts = torch.cat([image.values for image in images]).view(
            -1, side, side, vision.num_channels, vision.patch_size, vision.patch_size
        )
        tiles = parts.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        return {"pixel_values": tiles}


def picture(rows: int, columns: int) -> TilePixels:
    """Of rows x columns tiles."""
    tiles = rows * columns + (rows * columns > 1)
    return TilePixels((1, rows * SIDE, columns * SIDE), torch.randn(tiles * SIDE**2, 3 * PATCH**2))


def make_llama4(path: Path, seed: int, vision: dict[str, Any] | None = None, **text: Any) -> Llama4Oracle:
    """Writes the checkpoint. `vision`: fields of the tower; `text`: of the text model."""
    import transformers
    from transformers.models.llama4.processing_llama4 import chat_template

    transformers.utils.logging.disable_progress_bar()
    tower = VISION | (vision or {})
    config = transformers.Llama4Config(
        text_config=hub_fields("llama4") | {"initializer_range": 0.15} | text, vision_config=tower,
        boi_token_index=START, eoi_token_index=END, image_token_index=PATCH_TOKEN,
    )  # fmt: skip
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = transformers.Llama4ForConditionalGeneration(config).float().eval()
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.data = (0.0 if name.endswith("bias") else 1.0) + 0.2 * torch.randn_like(tensor)
        elif "language_model" not in name:
            tensor.data = 0.2 * torch.randn_like(tensor)
    model.language_model.lm_head.weight.data[START : PATCH_TOKEN + 1] = 0  # no answer has a token of images
    model.save_pretrained(path)
    torch.random.set_rng_state(state)
    write_tokenizer(path)
    name_tokens(path, NAMES, chat_template)
    processor = {"image_processor_type": "Llama4ImageProcessorFast", "max_patches": MOST, "resample": 2}
    processor["size"] = dict.fromkeys(("height", "width"), tower["image_size"])
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    return Llama4Oracle(path, model)
