"""A tiny random checkpoint of Command A Vision with its tower, tokenizer, chat template and image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.models.byte_tokenizer import BOS, EOS, write_tokenizer
from tests.models.checkpoints import hub_fields
from tests.models.vision_checkpoints import Made, Pixels, name_tokens

START, END, BREAK, IMAGE = 270, 271, 272, 273
NAMES = {
    START: "<|START_OF_IMG|>", END: "<|END_OF_IMG|>", BREAK: "<|IMG_LINE_BREAK|>", IMAGE: "<|IMG_PATCH|>",
}  # fmt: skip
PATCH, SIDE, MERGE = 4, 4, 2
"""Pixels of a patch, patches of a tile and of a token, in one direction."""
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 40, "image_size": SIDE * PATCH, "patch_size": PATCH, "vision_use_head": False,
}  # fmt: skip
MOST = 6
"""Tiles of an image, beside that of the whole."""
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}" + NAMES[IMAGE]
    + "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)  # fmt: skip


def tokens_of(grid: tuple[int, int, int], side: int, merge: int) -> list[int]:
    """The tokens of an image of tiles of side x side patches, as transformers' processor writes them."""
    tiles = (grid[1] // side) * (grid[2] // side)
    return [*[IMAGE] * (side // merge) ** 2, BREAK] * (tiles + (tiles > 1))


class TilePixels(Pixels):
    """Tiles by row, then one of the whole image if they are several; the grid has the patches of the former."""

    @property
    def num_tokens(self) -> int:
        return len(self.placeholders(IMAGE))

    def placeholders(self, image: int) -> list[int]:
        return tokens_of(self.grid, SIDE, MERGE)


class Cohere2Oracle(Made):
    """transformers' class for images leaves out the factor of logits, which its text models have."""

    def run(self, ids: list[int], images: list[Pixels], **options: Any) -> Any:
        found = super().run(ids, images, **options)
        found.logits = found.logits * self.model.config.text_config.logit_scale
        return found

    def image_inputs(self, ids: list[int], images: list[Pixels]) -> dict[str, Any]:
        vision = self.model.config.vision_config
        side = vision.image_size // vision.patch_size
        parts = torch.cat([image.values for image in images]).view(
            -1, side, side, vision.num_channels, vision.patch_size, vision.patch_size
        )
        return {"pixel_values": parts.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)}


def picture(rows: int, columns: int) -> TilePixels:
    """Of rows x columns tiles."""
    tiles = rows * columns + (rows * columns > 1)
    return TilePixels((1, rows * SIDE, columns * SIDE), torch.randn(tiles * SIDE**2, 3 * PATCH**2))


def make_cohere2(
    path: Path, seed: int, vision: dict[str, Any] | None = None, kind: str = "cohere2", **text: Any
) -> Cohere2Oracle:
    """Writes the checkpoint. `vision`: fields of the tower, `downsample_factor` and `alignment_intermediate_size`;
    `kind` and `text`: of the text model."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    given = {"downsample_factor": MERGE, "alignment_intermediate_size": 72} | (vision or {})
    outer = {name: given.pop(name) for name in ("downsample_factor", "alignment_intermediate_size")}
    tower, own = VISION | given, hub_fields(kind) | {"initializer_range": 0.15} | text
    config = transformers.Cohere2VisionConfig(
        text_config=own | {"model_type": kind}, vision_config=tower, image_token_id=IMAGE, **outer
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = transformers.Cohere2VisionForConditionalGeneration(config).float().eval()
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.data = (0.0 if name.endswith("bias") else 1.0) + 0.2 * torch.randn_like(tensor)
        elif "language_model" not in name and "lm_head" not in name:
            tensor.data = 0.2 * torch.randn_like(tensor)
    model.get_input_embeddings().weight.data[[START, END, IMAGE]] *= 0.01  # the tied head answers with no mark
    model.save_pretrained(path)
    torch.random.set_rng_state(state)
    write_tokenizer(path)
    name_tokens(path, NAMES, TEMPLATE)
    processor = {"image_processor_type": "Cohere2VisionImageProcessorFast", "max_patches": MOST, "resample": 3}
    processor["size"] = dict.fromkeys(("height", "width"), tower["image_size"])
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    return Cohere2Oracle(path, model)
