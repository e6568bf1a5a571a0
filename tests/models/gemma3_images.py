"""A tiny random checkpoint of Gemma 3 with its tower, tokenizer, chat template and image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.models.byte_tokenizer import BOS, EOS, write_tokenizer
from tests.models.checkpoints import hub_fields
from tests.models.vision_checkpoints import Made, Pixels, name_tokens

START, END, IMAGE = 270, 271, 272
NAMES = {START: "<start_of_image>", END: "<end_of_image>", IMAGE: "<image_soft_token>"}
PATCH, SIDE, TOKENS = 4, 8, 16
"""Pixels of a patch and patches of an image in one direction, tokens of an image."""
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 40, "image_size": SIDE * PATCH, "patch_size": PATCH, "vision_use_head": False,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}" + NAMES[START]
    + "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)  # fmt: skip


class FixedPixels(Pixels):
    """Of the size of all images."""

    @property
    def num_tokens(self) -> int:
        return TOKENS


class Gemma3Oracle(Made):
    def image_inputs(self, ids: list[int], images: list[Pixels]) -> dict[str, Any]:
        vision = self.model.config.vision_config
        side, patch = vision.image_size // vision.patch_size, vision.patch_size
        parts = torch.cat([image.values for image in images]).view(-1, side, side, 3, patch, patch)
        pixels = parts.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        return {"pixel_values": pixels, "token_type_ids": (torch.tensor([ids]) == IMAGE).long()}


def picture(side: int = SIDE, patch: int = PATCH) -> FixedPixels:
    return FixedPixels((1, side, side), torch.randn(side**2, 3 * patch**2))


def make_gemma3(path: Path, seed: int, vision: dict[str, Any] | None = None, **text: Any) -> Gemma3Oracle:
    """Writes the checkpoint. `vision`: fields of the tower, `mm_tokens_per_image`; `text`: of the text model."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    given = {"mm_tokens_per_image": TOKENS} | (vision or {})
    tokens = given.pop("mm_tokens_per_image")
    config = transformers.Gemma3Config(
        text_config=hub_fields("gemma3") | {"initializer_range": 0.15} | text, vision_config=VISION | given,
        mm_tokens_per_image=tokens, image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END,
    )  # fmt: skip
    config._attn_implementation = "eager"
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    for name, tensor in model.named_parameters():
        if ("language_model" in name and "norm" in name) or "mm_soft_emb_norm" in name:
            tensor.data = 0.2 * torch.randn_like(tensor)  # stored less 1
        elif "norm" in name:
            tensor.data = (0.0 if name.endswith("bias") else 1.0) + 0.2 * torch.randn_like(tensor)
        elif "language_model" not in name and "lm_head" not in name:
            tensor.data = 0.2 * torch.randn_like(tensor)
    model.get_input_embeddings().weight.data[[START, END, IMAGE]] *= 0.01  # the tied head answers with no mark
    model.save_pretrained(path)
    torch.random.set_rng_state(state)
    write_tokenizer(path)
    name_tokens(path, NAMES, TEMPLATE)
    processor = {"image_processor_type": "Gemma3ImageProcessor", "image_mean": [0.4, 0.5, 0.6], "do_pan_and_scan": None}
    processor["size"] = dict.fromkeys(("height", "width"), (VISION | given)["image_size"])
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    return Gemma3Oracle(path, model)
