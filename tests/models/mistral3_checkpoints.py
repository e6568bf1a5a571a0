"""Tiny random checkpoints by transformers' classes. `Mistral3ForConditionalGeneration`: Mistral Small 3.1, Ministral 3
or Mistral Small 4, by its text model; `MistralLarge4ForConditionalGeneration`; `LlavaForConditionalGeneration`: Pixtral
12B."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.byte_tokenizer import BOS, EOS, write_tokenizer
from tests.models.checkpoints import _FAMILY, LARGE4, hub_fields, write_tensors
from tests.models.vision_checkpoints import Made, Pixels, name_tokens

IMAGE, BREAK, END = 270, 272, 273
NAMES = {IMAGE: "[IMG]", BREAK: "[IMG_BREAK]", END: "[IMG_END]"}
PATCH, MERGE = 4, 2
TEXTS = ("mistral", "ministral3", "mistral4", LARGE4)
VISION = {
    "model_type": "pixtral", "patch_size": PATCH, "num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 24,
    "intermediate_size": 28, "image_size": 64, "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": 64},
    "patch_size": {"height": PATCH, "width": PATCH},
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}[IMG]{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


class RowPixels(Pixels):
    """An image whose rows of tokens have a token of the text after them."""

    merge = MERGE

    @property
    def num_tokens(self) -> int:
        return len(self.placeholders(IMAGE))

    def placeholders(self, image: int) -> list[int]:
        row = [*[image] * (self.grid[2] // self.merge), BREAK]
        return [*(row * (self.grid[1] // self.merge))[:-1], END]


class PatchPixels(RowPixels):
    """An image with a token for each patch."""

    merge = 1


class Mistral3Oracle(Made):
    def image_inputs(self, ids: list[int], images: list[Pixels]) -> dict[str, Any]:
        whole = [whole_image(image) for image in images]
        height, width = (max(image.shape[axis] for image in whole) for axis in (1, 2))
        padded = torch.zeros(len(images), 3, height, width)
        for target, image in zip(padded, whole):
            target[:, : image.shape[1], : image.shape[2]] = image
        sizes = torch.tensor([image.shape[1:] for image in whole])
        return {"pixel_values": padded, "image_sizes": sizes}


def whole_image(image: Pixels) -> Tensor:
    """Patches by row -> [3, height, width]."""
    rows, columns = image.grid[1:]
    side = math.isqrt(image.values.shape[1] // 3)
    parts = image.values.view(rows, columns, 3, side, side)
    return parts.permute(2, 0, 3, 1, 4).reshape(3, rows * side, columns * side)


def make_mistral3(
    path: Path, seed: int, text: str = "mistral", bias: bool = False, act: str = "silu", merge: int = MERGE,
    tower: dict[str, Any] | None = None, **more: Any,
) -> Mistral3Oracle:  # fmt: skip
    """Writes the checkpoint. `text`: one of `TEXTS`, with the fields `more`; `bias`: of the projector; `act`: of the
    tower's MLP; `merge`: of its patches; `tower`: more of its fields."""
    import transformers

    fields = hub_fields(text) | {"initializer_range": 0.15} | more
    if text == LARGE4:
        del fields["rope_scaling"]
    name = "MistralLarge4Text" if text == LARGE4 else _FAMILY[text][0]
    outer = "MistralLarge4" if text == LARGE4 else "Mistral3"
    inner = getattr(transformers, f"{name}Config")(**fields)
    config = getattr(transformers, f"{outer}Config")(
        text_config=inner.to_dict(), vision_config=VISION | {"hidden_act": act} | (tower or {}),
        image_token_index=IMAGE, spatial_merge_size=merge, multimodal_projector_bias=bias, tie_word_embeddings=False,
    )  # fmt: skip
    return _write(path, seed, getattr(transformers, f"{outer}ForConditionalGeneration"), config)


def make_pixtral(path: Path, seed: int, tower: dict[str, Any] | None = None, **more: Any) -> Mistral3Oracle:
    """Pixtral 12B in the layout of transformers' Llava. `more`: fields of the text model; `tower`: of the tower."""
    import transformers

    fields = hub_fields("mistral") | {"initializer_range": 0.15, "sliding_window": None} | more
    config = transformers.LlavaConfig(
        text_config=transformers.MistralConfig(**fields).to_dict(),
        vision_config=VISION | {"hidden_act": "silu"} | (tower or {}),
        image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy="full", image_seq_length=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    return _write(path, seed, transformers.LlavaForConditionalGeneration, config)


def _write(path: Path, seed: int, model_class: Any, config: Any) -> Mistral3Oracle:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    for name, tensor in model.named_parameters():
        if "norm" in name or "ln_pre" in name:
            tensor.data = 1 + 0.2 * torch.randn_like(tensor)
        elif "softmax_scaling" in name:
            tensor.data = 0.3 + 0.2 * torch.randn_like(tensor)
        elif "language_model" not in name:
            tensor.data = 0.2 * torch.randn_like(tensor)
    for name, tensor in model.named_buffers():
        if name.endswith("rotary_emb.alpha"):
            tensor.data = 0.3 * torch.randn_like(tensor)
    model.lm_head.weight.data[IMAGE : END + 1] = 0  # no answer has a placeholder of an image
    model.save_pretrained(path)
    torch.random.set_rng_state(state)
    model = type(model).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    saved = load_file(path / "model.safetensors")
    write_tensors(path, {published_name(name): tensor for name, tensor in saved.items()})
    write_tokenizer(path)
    name_tokens(path, NAMES, TEMPLATE)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    return Mistral3Oracle(path, model)


def published_name(name: str) -> str:
    """As Mistral Small 3.1 is published."""
    for saved, published in (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ):
        name = name.replace(saved, published) if name.startswith(saved) else name
    return name.removeprefix("model.") if name.startswith(("model.vision_tower", "model.multi_modal")) else name
