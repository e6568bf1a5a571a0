"""Tiny random checkpoints of models for images and text, with tokenizer, chat template and image processor, and
transformers' models as oracles."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_engine.models.checkpoint_files import read_checkpoint
from tests.models.byte_tokenizer import BOS, EOS, VOCAB_SIZE, write_tokenizer
from tests.models.checkpoints import DELTA, join_experts, with_mtp_beside

START, IMAGE, VIDEO, END = range(270, 274)
"""Placeholder tokens: ids of the byte tokenizer's fillers."""
NAMES = {START: "<|extra_270|>", IMAGE: "<|extra_271|>", VIDEO: "<|extra_272|>", END: "<|extra_273|>"}
PATCH, MERGE = 14, 2
TIE = 1e-3
"""Best two log-probabilities that are closer than this: rounding decides between them."""
TOKEN_PIXELS = PATCH * MERGE
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "temporal_patch_size": 2,
    "merge_size": MERGE, "min_pixels": TOKEN_PIXELS**2, "max_pixels": 60 * TOKEN_PIXELS**2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}" + NAMES[START] + NAMES[IMAGE] + NAMES[END]
    + "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)  # fmt: skip

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rms_norm_eps": 1e-6, "initializer_range": 0.15,
    "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": False,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 44, "out_hidden_size": 64, "patch_size": PATCH,
    "spatial_merge_size": MERGE, "temporal_patch_size": 2, "initializer_range": 0.15,
}  # fmt: skip
_FAMILY: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", {}, {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}),
    "qwen2_5_vl": ("Qwen2_5_VL", {}, {"window_size": 56, "fullatt_block_indexes": [1]}),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
        }
        | {"rope_scaling": {"rope_type": "default", "mrope_section": [6, 3, 3], "mrope_interleaved": True}},
        {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 16, "intermediate_size": 52},
    ),
}
_FAMILY["qwen3_vl"] = (
    "Qwen3VL", {name: _FAMILY["qwen3_vl_moe"][1][name] for name in ("head_dim", "rope_scaling")},
    _FAMILY["qwen3_vl_moe"][2],
)  # fmt: skip
_FAMILY |= {
    "qwen3_5": (
        "Qwen3_5",
        {**DELTA, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2], "mrope_interleaved": True}},
        {"num_position_embeddings": 16, "intermediate_size": 52},
    )
}
_FAMILY["qwen3_5_moe"] = (
    "Qwen3_5Moe",
    _FAMILY["qwen3_5"][1]
    | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    _FAMILY["qwen3_5"][2],
)
_FAMILY |= {
    "glm4v": (
        "Glm4v", {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}, "partial_rotary_factor": 0.5},
        {"image_size": 5 * PATCH},
    ),
    "glm4v_moe": (
        "Glm4vMoe",
        {
            "rope_scaling": {"rope_type": "default", "mrope_section": [1, 2, 3]}, "head_dim": 24,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 2, "topk_group": 1,
            "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
        },
        {"image_size": 3 * PATCH, "attention_bias": True, "intermediate_size": 52},
    ),
}  # fmt: skip
GLM = ("glm4v", "glm4v_moe")
VOLUME = {"shortest_edge": 2 * TOKEN_PIXELS**2, "longest_edge": 2 * 60 * TOKEN_PIXELS**2}
"""Bounds of GLM's processor: pixels of both frames."""
KINDS = ("qwen2_5_vl", "qwen3_vl_moe")


def make_checkpoint(
    kind: str, path: Path, seed: int = 0, num_mtp_layers: int = 0, tower: dict[str, Any] | None = None, **text: Any
) -> Path:
    """Writes a checkpoint directory in float32 and returns its path. `text`: fields of the text model; `tower`: of the
    vision tower. `num_mtp_layers`: 0 or 1, of Qwen3.5."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    family, more, vision = _FAMILY[kind]
    if "hidden_size" in text:
        vision = vision | {"hidden_size" if kind == "qwen2_vl" else "out_hidden_size": text["hidden_size"]}
    path.mkdir(parents=True, exist_ok=True)
    config = getattr(transformers, f"{family}Config")(
        text_config=_TEXT | more | text, vision_config=_VISION | vision | (tower or {}),
        image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=START, vision_end_token_id=END, eos_token_id=EOS,
    )  # fmt: skip
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float()
    for name, tensor in model.named_parameters():
        if kind.startswith("qwen3_5") and "language_model" in name and "norm" in name and "linear_attn" not in name:
            tensor.data = 0.2 * torch.randn_like(tensor)  # stored less 1
        elif name.endswith("A_log"):
            tensor.data = torch.empty_like(tensor).uniform_(0.02, 1.0).log()
        elif name.endswith("conv1d.weight"):
            tensor.data = 0.5 * torch.randn_like(tensor)
        elif "norm" in name or "ln_q" in name:
            tensor.data = (0.0 if name.endswith("bias") else 1.0) + 0.2 * torch.randn_like(tensor)
        elif name.endswith("bias"):
            tensor.data = 0.3 * torch.randn_like(tensor)
        elif "patch_embed" in name:
            tensor.data = 0.05 * torch.randn_like(tensor)
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(0.1 * torch.randn_like(tensor))
    model.lm_head.weight.data[START : END + 1] = 0  # no answer has placeholders, which the oracle would take for images
    model.save_pretrained(path)
    if kind == "qwen3_vl_moe":
        _transpose_experts(path / "model.safetensors")
    if num_mtp_layers:
        _add_mtp(path / "model.safetensors", 3, seed)
    if kind == "qwen3_5_moe":
        join_experts(path)
    torch.random.set_rng_state(state)
    write_tokenizer(path)
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": TEMPLATE}))
    (path / "preprocessor_config.json").write_text(json.dumps(_processor(kind)))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    assert read_checkpoint(path)
    return path


def _processor(kind: str) -> dict[str, Any]:
    if kind not in GLM:
        return PROCESSOR
    kept = {name: value for name, value in PROCESSOR.items() if not name.endswith("_pixels")}
    return kept | {"image_processor_type": "Glm4vImageProcessor", "size": VOLUME}


def add_images(path: Path, seed: int, tokens: dict[str, int], processor: dict[str, Any]) -> None:
    """Draws the tower of a checkpoint again, and adds the ids of image tokens, a chat template and the processor."""
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if "visual" in name:
            drawn = torch.randn(tensor.shape, generator=generator)
            tensors[name] = 1 + 0.2 * drawn if "norm" in name and name.endswith("weight") else 0.2 * drawn
    tensors["lm_head.weight"][START : END + 1] = 0  # no answer has a placeholder
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | tokens))
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))


def name_tokens(path: Path, names: dict[int, str], template: str) -> None:
    """Gives fillers of the byte tokenizer the names of image tokens, and the tokenizer a chat template."""
    tokenizer = path / "tokenizer.json"
    content = tokenizer.read_text()
    for token, name in names.items():
        content = content.replace(f"<|extra_{token}|>", name)
    tokenizer.write_text(content)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))


def _transpose_experts(file: Path) -> None:
    """As published checkpoints have them."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def _add_mtp(file: Path, num_layers: int, seed: int) -> None:
    tensors, inner = load_file(file), "model.language_model."
    text = {name.replace(inner, "model."): tensor for name, tensor in tensors.items()}
    made = with_mtp_beside(text, num_layers, torch.Generator().manual_seed(seed))
    save_file(tensors | {n: t.contiguous() for n, t in made.items() if n.startswith("mtp.")}, file, {"format": "pt"})


@dataclass(frozen=True)
class Pixels:
    """An image as the processor writes it."""

    grid: tuple[int, int, int]
    values: Tensor  # [P, patch width] float32

    @property
    def num_tokens(self) -> int:
        return self.grid[1] * self.grid[2] // MERGE**2

    def placeholders(self, image: int) -> list[int]:
        """Its tokens in a prompt."""
        return [image] * self.num_tokens


def random_pixels(rows: int, columns: int, generator: torch.Generator) -> Pixels:
    """Of rows x columns tokens. As of a still image, the frames of a patch are the same."""
    shape = (rows * columns * MERGE**2, 3, 1, PATCH * PATCH)
    values = torch.randn(shape, generator=generator).expand(-1, -1, 2, -1).flatten(1).contiguous()
    return Pixels((1, rows * MERGE, columns * MERGE), values)


def noise_pixels(rows: int, columns: int, patch_width: int) -> Pixels:
    """Of rows x columns tokens, patches by row."""
    grid = (1, rows * MERGE, columns * MERGE)
    return Pixels(grid, torch.randn(grid[1] * grid[2], patch_width))


def pixel_inputs(images: list[Pixels]) -> dict[str, Any]:
    return {
        "pixel_values": torch.cat([image.values for image in images]),
        "image_grid_thw": torch.tensor([image.grid for image in images]),
    }


def with_images(parts: list[list[int] | Pixels]) -> tuple[list[int], list[Pixels], list[int]]:
    """Token ids of text and images, the images, and the places of their first tokens."""
    ids: list[int] = []
    images, places = [], []
    for part in parts:
        if isinstance(part, Pixels):
            places.append(len(ids) + 1)
            images.append(part)
            ids += [START, *[IMAGE] * part.num_tokens, END]
        else:
            ids += part
    return ids, images, places


class GreedyOracle(ABC):
    """transformers' model of a checkpoint."""

    model: Any

    @abstractmethod
    def image_inputs(self, ids: list[int], images: list[Pixels]) -> dict[str, Any]:
        """Arguments of the model beside the ids; there are images."""

    @torch.no_grad()
    def logits(self, ids: list[int], images: list[Pixels]) -> Tensor:
        """[T, V] float32."""
        return self.run(ids, images).logits[0]

    def run(self, ids: list[int], images: list[Pixels], **options: Any) -> Any:
        given = self.image_inputs(ids, images) if images else {}
        return self.model(torch.tensor([ids]), **given, **options)

    def greedy(
        self, ids: list[int], images: list[Pixels], count: int, likely: Sequence[int] = ()
    ) -> list[tuple[int, float]]:
        """Tokens and log-probabilities of an answer, up to a token whose rank is doubtful (`TIE`). Tokens of `likely`,
        the answer that is checked, take one pass together as far as they are the model's."""
        answer: list[tuple[int, float]] = []
        drafts = list(likely[: count - 1])
        while True:
            known = [token for token, _ in answer]
            scores = self.logits([*ids, *known, *drafts], images)[len(ids) + len(known) - 1 :].log_softmax(-1)
            for best, draft in zip_longest(zip(*scores.topk(2)), drafts):
                values, tokens = best
                if values[0] - values[1] < TIE:
                    return answer
                answer.append((int(tokens[0]), float(values[0])))
                if len(answer) == count:
                    return answer
                if tokens[0] != draft:
                    break
            drafts = []


@dataclass(frozen=True)
class Made(GreedyOracle):
    """A checkpoint that was saved from `model`."""

    path: Path
    model: Any

    def image_inputs(self, ids: list[int], images: list[Pixels]) -> dict[str, Any]:
        return pixel_inputs(images)


class Oracle(GreedyOracle):
    """The model in float32 with eager attention."""

    def __init__(self, path: Path) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def vector(self, ids: list[int], images: list[Pixels]) -> list[float]:
        """The last token's state after the final norm, normalized."""
        state = self.run(ids, images, output_hidden_states=True).hidden_states[-1][0, -1]
        return torch.nn.functional.normalize(state, dim=-1).tolist()

    def run(self, ids: list[int], images: list[Pixels], **options: Any) -> Any:
        self.model.model.rope_deltas = None
        return super().run(ids, images, **options)

    def image_inputs(self, ids: list[int], images: list[Pixels]) -> dict[str, Any]:
        return pixel_inputs(images) | {"mm_token_type_ids": (torch.tensor([ids]) == IMAGE).int()}


def random_picture(width: int, height: int, seed: int) -> Any:
    """A PIL image of noise with a gradient."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, (height, width, 3))
    ramp = np.linspace(0, 255, width)[None, :, None]
    return Image.fromarray(((noise + ramp) // 2).astype(np.uint8))
