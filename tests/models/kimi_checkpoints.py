"""A tiny random checkpoint of Kimi K2.5 by transformers' classes, under the published names; optionally with INT4
experts in compressed-tensors' layout, as published."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.models.byte_tokenizer import BOS, EOS
from tests.models.checkpoints import hub_fields, write_tensors
from tests.models.quantized import quantize, section
from tests.models.vision_checkpoints import Made, Pixels

IMAGE, PATCH = 271, 2
VISION = {
    "patch_size": PATCH, "pos_emb_height": 4, "pos_emb_width": 4, "num_attention_heads": 2, "num_hidden_layers": 2,
    "hidden_size": 16, "intermediate_size": 24,
}  # fmt: skip
LAYERS = "language_model.model.layers"
PUBLISHED = {
    "vision_tower.encoder.patch_embed": "vision_tower.patch_embed",
    "model.mm_projector.pre_norm": "mm_projector.pre_norm",
    "language_model.model.blocks": LAYERS,
}
"""Names that transformers does not undo when it saves."""
PLAIN_MODULES = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")
"""Published `ignore` of the INT4 checkpoints, whose tower has no entry."""


class KimiOracle(Made):
    def image_inputs(self, ids: list[int], images: list[Pixels]) -> dict[str, Any]:
        values = torch.cat([image.values for image in images])
        side = math.isqrt(values.shape[1] // 3)
        return {
            "pixel_values": values.view(-1, 3, side, side),
            "image_grid_thw": torch.tensor([image.grid for image in images]),
        }


def make_kimi(
    path: Path, seed: int, int4: bool = False, tower: dict[str, Any] | None = None, **text: Any
) -> KimiOracle:
    """Writes the checkpoint. `int4`: routed experts have 4 bits in groups of 32, and the model has their values.
    `tower`, `text`: fields of the tower and of the text model."""
    import transformers

    fields = {
        key: value for key, value in hub_fields("deepseek_v3").items() if key not in ("topk_method", "scoring_func")
    }
    fields |= {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.827} | text
    vision = VISION | (tower or {})
    config = transformers.Kimi_K25Config(
        text_config=transformers.DeepseekV3Config(**fields).to_dict(), vision_config=vision,
        projection_hidden_size=vision["hidden_size"], tie_word_embeddings=False, image_token_id=IMAGE,
        video_token_id=272,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Kimi_K25ForConditionalGeneration(config).float().eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:
            tensor.data = (not name.endswith("bias")) + 0.2 * torch.randn_like(tensor)
        elif name.endswith("e_score_correction_bias"):
            tensor.data = 0.1 * torch.randn_like(tensor)
        elif "language_model" not in name and "inv_freq" not in name and "time_" not in name:
            tensor.data = 0.2 * torch.randn_like(tensor)
    model.lm_head.weight.data[IMAGE : IMAGE + 2] = 0  # no answer has a placeholder of an image or video
    model.save_pretrained(path)
    saved = load_file(path / "model.safetensors")
    if int4:
        saved, values = quantize(saved, "pack-quantized", chosen=lambda name: ".mlp.experts." in name)
        write_tensors(path, values)
        model = type(model).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        raw = json.loads((path / "config.json").read_text())
        raw["text_config"]["quantization_config"] = section("pack-quantized", ignore=PLAIN_MODULES)
        (path / "config.json").write_text(json.dumps(raw))
    write_tensors(path, {published_name(name): tensor for name, tensor in saved.items()})
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    return KimiOracle(path, model)


def published_name(name: str) -> str:
    for saved, published in PUBLISHED.items():
        name = name.replace(saved, published)
    return name
