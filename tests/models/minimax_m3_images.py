"""A tiny random checkpoint of MiniMax-M3 with its tower, tokenizer, chat template and image processor."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.byte_tokenizer import BOS, EOS, write_tokenizer
from tests.models.checkpoints import BLOCK_SPARSE, add_mtp_layer, hub_fields, with_minimax_mtp, write_tensors
from tests.models.vision_checkpoints import MERGE, TEMPLATE, Made, name_tokens, noise_pixels

IMAGE, VIDEO, START, END = 270, 271, 274, 275
NAMES = {
    IMAGE: "]<]image[>[", VIDEO: "]<]video[>[", START: "]<]start of image[>[", END: "]<]end of image[>[",
}  # fmt: skip
PATCH = 4
VISION = {
    "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": PATCH,
    "image_size": 64, "hidden_act": "gelu", "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "MiniMaxM3VLImageProcessor", "size": [672, 672], "patch_size": PATCH, "merge_size": MERGE,
    "temporal_patch_size": 2, "min_pixels": 4 * 8 * 8, "max_pixels": 60 * 8 * 8,
}  # fmt: skip


picture = partial(noise_pixels, patch_width=3 * 2 * PATCH**2)


def make_minimax_m3(
    path: Path, seed: int, vision: dict[str, Any] | None = None, num_mtp_layers: int = 0, **text: Any
) -> Made:
    """Writes the checkpoint. `vision`: fields of the tower; `text`: of the text model."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.MiniMaxM3VLConfig(
        text_config=hub_fields(BLOCK_SPARSE) | {"initializer_range": 0.15} | text,
        vision_config=VISION | (vision or {}), projector_hidden_size=52, image_token_index=IMAGE,
        video_token_index=VIDEO,
    )  # fmt: skip
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = transformers.MiniMaxM3SparseForConditionalGeneration(config).float().eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data = _values(name, tensor)
    model.lm_head.weight.data[IMAGE : END + 1] = 0  # no answer has a placeholder of an image or video
    model.save_pretrained(path)
    torch.random.set_rng_state(state)
    model = type(model).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    if num_mtp_layers:
        _add_mtp(path, num_mtp_layers, seed)
    write_tokenizer(path)
    template = TEMPLATE.replace("<|extra_270|><|extra_271|><|extra_273|>", NAMES[IMAGE])
    assert template != TEMPLATE
    name_tokens(path, NAMES, template)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    return Made(path, model)


def _add_mtp(path: Path, count: int, seed: int) -> None:
    raw = json.loads((path / "config.json").read_text())
    num_layers = raw["text_config"]["num_hidden_layers"]
    raw["text_config"]["num_mtp_modules"] = count
    (path / "config.json").write_text(json.dumps(raw))
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(seed)
    for index in range(count):
        add_mtp_layer(tensors, num_layers, index, raw["text_config"]["hidden_size"], generator)
    write_tensors(path, with_minimax_mtp(tensors, num_layers))


def _values(name: str, tensor: Tensor) -> Tensor:
    random = torch.randn_like(tensor) if tensor.is_floating_point() else tensor
    if "inv_freq" in name:
        return tensor
    if "norm" in name or "layrnorm" in name:
        less = "language_model" in name or name.endswith("bias")  # the text model's norms are stored less 1
        return (0.0 if less else 1.0) + 0.2 * random
    if name.endswith("e_score_correction_bias"):
        return 0.1 * random
    return tensor if "language_model" in name else 0.2 * random
