"""The families of docs/parity.md: a random checkpoint of each, transformers' model, and prompts, with images for the
models that take them."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.media.image_process import load_processor
from tests.models import (
    cohere2_images,
    deepseek_v41,
    gemma3_images,
    kimi_checkpoints,
    kimi_k3,
    ling_v2,
    ling_v2_5,
    llama4_images,
    mimo,
    minimax_m3_images,
    mistral3_checkpoints,
    mistral_native,
    qwen4_exp_images,
    sparse,
    v4_checkpoints,
    v41_dspark,
    v41_images,
    v41_quantized,
    v41_tower,
    vision_checkpoints,
)
from tests.models.checkpoints import LARGE4, make_checkpoint
from tests.models.vision_checkpoints import Oracle, Pixels, random_picture

ORDINARY = 250
"""Token ids from here on are special."""
SHAPE: dict[str, Any] = {"max_position_embeddings": 1024, "num_hidden_layers": 3}
MAX_IMAGES = 3
CLEAR = 2e-6
"""The least distance of two scores, relative to the best, that rounding does not exceed."""
NOISE, NUM_NOISES = 4e-7, 6
"""Of embeddings, relative: the errors of all layers of a float32 model together."""

Logits = Callable[[list[int], list[Pixels]], Tensor]
Marks = tuple[list[int], int, list[int]]


@dataclass(frozen=True)
class Prompt:
    """`ids` has one placeholder for each image; `whole` a token for each row of the tower."""

    ids: list[int]
    whole: list[int]
    images: list[Pixels] = field(default_factory=list)
    data: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Family:
    """A checkpoint, transformers' logits [T, V] of a prompt, and prompts by (seed, count, longest).

    Attributes:
        embeddings: of the oracle's tokens; `moved` changes them.
    """

    path: Path
    oracle: Logits
    prompts: Callable[[int, int, int], list[Prompt]]
    embeddings: Tensor
    _known: dict[Any, Tensor] = field(default_factory=dict)

    def logits(self, ids: list[int], images: list[Pixels]) -> Tensor:
        """The oracle's; texts that forms have in common are computed once."""
        text = tuple(ids), tuple(map(id, images))
        if text not in self._known:
            self._known[text] = self.oracle(ids, images)
        return self._known[text]

    @torch.no_grad()
    def moved(self, ids: list[int], images: list[Pixels]) -> Tensor:
        """By how much [T] noise of the size of rounding in the embeddings changes a log-probability: by 1 where it
        decides a selection of experts or entries, by little elsewhere."""
        own, draws = self.embeddings.clone(), torch.Generator().manual_seed(len(ids))
        want = self.logits(ids, images).log_softmax(-1)
        distances = []
        for _ in range(NUM_NOISES):
            noise = torch.randn(own.shape, generator=draws, dtype=own.dtype)
            self.embeddings.copy_(own * (1 + NOISE * noise))
            distances.append((self.oracle(ids, images).log_softmax(-1) - want).abs().amax(-1))
        self.embeddings.copy_(own)
        return torch.stack(distances).amax(0)


def text_family(kind: str, path: Path, seed: int, **options: Any) -> Family:
    import transformers

    make_checkpoint(kind.removesuffix("_text"), path, seed, **SHAPE | options)
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.eval()

    def logits(ids: list[int], images: list[Pixels]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0]

    return Family(path, logits, text_prompts, model.get_input_embeddings().weight)


def ling_v2_family(kind: str, path: Path, seed: int, **options: Any) -> Family:
    """Of GLM-4.5 with the same tensors."""
    found = text_family(ling_v2.LIKE, ling_v2.like(path), seed, use_qk_norm=True, num_mtp_layers=1, n_group=4)
    return replace(found, path=ling_v2.as_ling_v2(found.path, path))


def mimo_family(kind: str, path: Path, seed: int, **options: Any) -> Family:
    """Of Qwen2 with the same tensors."""
    found = text_family(mimo.LIKE, mimo.like(path), seed, tie_word_embeddings=False)
    return replace(found, path=mimo.as_mimo(found.path, path, seed))


def qwen_family(kind: str, path: Path, seed: int, **options: Any) -> Family:
    vision_checkpoints.make_checkpoint(kind, path, seed, max_position_embeddings=1024, **options)
    return _of_qwen(path)


def qwen4_family(kind: str, path: Path, seed: int) -> Family:
    made = qwen4_exp_images.make_qwen4(path, seed, num_mtp_layers=1, max_position_embeddings=1024)
    return _clear(_of_qwen(made))


def _of_qwen(path: Path) -> Family:
    marks = [vision_checkpoints.START], vision_checkpoints.IMAGE, [vision_checkpoints.END]
    return _with_images(path, Oracle(path), marks, side=160)


def kimi_family(kind: str, path: Path, seed: int, tower: dict[str, Any] | None = None, **text: Any) -> Family:
    """With INT4 experts, as published."""
    fields = {"max_position_embeddings": 1024} | text
    made = kimi_checkpoints.make_kimi(path, seed, int4=True, tower=tower, **fields)
    vision = kimi_checkpoints.VISION | {"merge_kernel_size": [2, 2]} | (tower or {})
    own = {"patch_size": vision["patch_size"], "merge_kernel_size": vision["merge_kernel_size"][0]}
    own["in_patch_limit"] = 120
    (path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": own}))
    return _with_images(path, made, ([], kimi_checkpoints.IMAGE, []), side=24)


def minimax_m3_family(kind: str, path: Path, seed: int) -> Family:
    made = minimax_m3_images.make_minimax_m3(path, seed, num_mtp_layers=1, max_position_embeddings=1024)
    marks = [minimax_m3_images.START], minimax_m3_images.IMAGE, [minimax_m3_images.END]
    return _with_images(path, made, marks, side=50, added=True)


def llama4_family(kind: str, path: Path, seed: int) -> Family:
    """Chunks of 70 tokens, images of up to 6 tiles."""
    made = llama4_images.make_llama4(path, seed, **SHAPE | {"attention_chunk_size": 70, "floor_scale": 50})
    marks = [llama4_images.START], llama4_images.IMAGE, [llama4_images.END]
    return _with_images(path, made, marks, llama4_images.TilePixels, side=60, added=True)


def gemma3_vision_family(kind: str, path: Path, seed: int) -> Family:
    made = gemma3_images.make_gemma3(path, seed, **SHAPE)
    marks = [gemma3_images.START], gemma3_images.IMAGE, [gemma3_images.END]
    return _with_images(path, made, marks, gemma3_images.FixedPixels, side=60)


def cohere2_vision_family(kind: str, path: Path, seed: int) -> Family:
    """Windows of 20 tokens, images of up to 6 tiles."""
    made = cohere2_images.make_cohere2(path, seed, **SHAPE)
    marks = [cohere2_images.START], cohere2_images.IMAGE, [cohere2_images.END]
    return _with_images(path, made, marks, cohere2_images.TilePixels, side=60, added=True)


def _with_images(
    path: Path, oracle: Any, marks: Marks, image: type[Pixels] = Pixels, *, side: int, added: bool = False
) -> Family:
    """A family of a checkpoint with an image processor.

    Args:
        marks: tokens before an image, its placeholder, and tokens after it; added: by the engine.
        image: the pixels of a picture; side: the longest one of a picture.
    """
    processor = load_processor(str(path))

    def pixels(picture: Any) -> Pixels:
        found = processor(images=[picture], return_tensors="np")
        return image(tuple(found["image_grid_thw"][0].tolist()), torch.from_numpy(found["pixel_values"]))

    def prompts(seed: int, count: int, longest: int) -> list[Prompt]:
        drawn = image_prompts(seed, count, longest, pixels, marks, side)
        return [_with_placeholders(prompt, *marks[0], *marks[2]) for prompt in drawn] if added else drawn

    return Family(path, oracle.logits, prompts, oracle.model.get_input_embeddings().weight)


def _with_placeholders(prompt: Prompt, *around: int) -> Prompt:
    """The prompt without the tokens around images, which the engine adds."""
    return replace(prompt, ids=[id for id in prompt.ids if id not in around])


def mistral3_family(kind: str, path: Path, seed: int) -> Family:
    made = mistral3_checkpoints.make_mistral3(path, seed, "ministral3", max_position_embeddings=1024)
    return _with_rows(path, made, mistral3_checkpoints.RowPixels, side=80)


def mistral_large3_family(kind: str, path: Path, seed: int) -> Family:
    """In Mistral's own files."""
    made = mistral_native.make_mistral_large3(path, seed, max_position_embeddings=1024)
    return _with_rows(path, made, mistral3_checkpoints.RowPixels, side=80)


def mistral_large4_family(kind: str, path: Path, seed: int) -> Family:
    """A layer has the latents of another one, and one its selection; two of four have rotary positions."""
    fields = {"max_position_embeddings": 1024, "kv_source_layers": [0, 1, 0, 3], "num_hidden_layers": 4}
    fields |= {"indexer_types": ["full", "full", "full", "shared"]}
    made = mistral3_checkpoints.make_mistral3(path, seed, LARGE4, **fields)
    return _clear(_with_rows(path, made, mistral3_checkpoints.RowPixels, side=80))


def pixtral_family(kind: str, path: Path, seed: int, tower: dict[str, Any] | None = None, **text: Any) -> Family:
    made = mistral3_checkpoints.make_pixtral(path, seed, tower, **{"max_position_embeddings": 1024} | text)
    return _with_rows(path, made, mistral3_checkpoints.PatchPixels, side=40)


def _with_rows(path: Path, made: mistral3_checkpoints.Mistral3Oracle, image: type[Pixels], side: int) -> Family:
    return _with_images(path, made, ([], mistral3_checkpoints.IMAGE, []), image, side=side)


def v4_family(kind: str, path: Path, seed: int, make: Callable[..., Path] | None = None, **fields: Any) -> Family:
    """Windows of 16 tokens, entries of 4 and 8. make: writes the checkpoint by (path, seed, **fields)."""
    make = make or partial(v4_checkpoints.make_v4, num_mtp_layers=1)
    make(path, seed, **{"max_position_embeddings": 1024} | fields)
    model = v4_checkpoints.load_v4(path)

    def logits(ids: list[int], images: list[Pixels]) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(torch.tensor([ids])).logits[0]
            return found

    return _clear(Family(path, logits, text_prompts, model.get_input_embeddings().weight))


def pooled_family(kind: str, path: Path, seed: int) -> Family:
    return _clear(text_family(kind, path, seed, num_hidden_layers=4, num_mtp_layers=1))


def _clear(family: Family) -> Family:
    """With prompts without near ties between pools, entries or experts: a token beyond one follows another rounding."""

    def is_clear(prompt: Prompt) -> bool:
        oracle = partial(family.oracle, prompt.whole, prompt.images)
        return sparse.with_margin(oracle, needed=False)[1] > CLEAR  # a short prompt may select all

    def prompts(seed: int, count: int, longest: int) -> list[Prompt]:
        found = list(islice(filter(is_clear, family.prompts(seed, 3 * count, longest)), count))
        assert len(found) == count, f"{len(found)} of {3 * count} prompts have no near tie"
        return found

    return replace(family, prompts=prompts)


def k3_family(kind: str, path: Path, seed: int, **fields: Any) -> Family:
    """The formulas in float64: transformers has no such model."""
    reference = kimi_k3.K3Reference(kimi_k3.make_k3(path, seed, **{"max_position_embeddings": 1024} | fields))
    return Family(path, lambda ids, images: reference.logits(ids), text_prompts, reference.embeddings)


def ling_family(kind: str, path: Path, seed: int, **fields: Any) -> Family:
    """The formulas in float64: transformers has no such model."""
    fields = {"max_position_embeddings": 1024, "num_mtp_layers": 1} | fields
    reference = ling_v2_5.LingReference(ling_v2_5.make_ling(path, seed, **fields))
    return Family(path, lambda ids, images: reference.logits(ids), text_prompts, reference.embeddings)


def v41_family(kind: str, path: Path, seed: int, tower: dict[str, Any] | None = None, **fields: Any) -> Family:
    """The formulas in float64: no released transformers has such a model. With DSpark layers, and images. Prompts
    without near ties between entries or experts, as `_clear`."""
    vision = v41_tower.VISION | {"max_image_tokens": 60} | (tower or {})
    made = v41_dspark.make_v41_dspark(path, seed, vision=vision, **{"max_position_embeddings": 1024} | fields)
    oracle, processor = v41_images.V41Oracle(made), load_processor(str(path))
    image = type("Image", (v41_tower.DelimitedPixels,), {"side": vision["downsample_ratio"]})

    def pixels(picture: Any) -> Pixels:
        found = processor(images=[picture])
        grid = tuple(found["image_grid_thw"][0].tolist())
        return image(grid, torch.from_numpy(found["pixel_values"]))

    def prompts(seed: int, count: int, longest: int) -> list[Prompt]:
        # with images as long as those of text alone: the pool of windows keeps all prefixes
        drawn = image_prompts(seed, 2 * count, longest * 2 // 3, pixels, ([], v41_tower.IMAGE, []), side=40)
        found = list(islice((prompt for prompt in drawn if oracle.is_clear(prompt.whole, prompt.images, CLEAR)), count))
        assert len(found) == count, f"{len(found)} of {2 * count} prompts have no near tie"
        return found

    return Family(path, oracle.logits, prompts, oracle.text.embeddings)


def v41_fp4_family(kind: str, path: Path, seed: int, **more: Any) -> Family:
    """In the published form: FP4 experts, tables of n-grams in FP8, block FP8. The reference has the values of the
    stored numbers."""
    torch.manual_seed(seed)
    fields = v41_quantized.WIDTHS | {"max_position_embeddings": 1024} | more
    source = v41_dspark.make_v41_dspark(path / "source", seed, **fields)
    stored, values = v41_quantized.quantized_v41(source, path)
    reference = deepseek_v41.V41Reference(values)
    return Family(stored, lambda ids, images: reference.logits(ids), text_prompts, reference.embeddings)


OWN_FAMILIES: dict[str, Callable[..., Family]] = {
    "cohere2_vision": cohere2_vision_family, "gemma3_vision": gemma3_vision_family,
    "kimi_k25": kimi_family, "llama4": llama4_family, "mistral3": mistral3_family, "pixtral": pixtral_family,
    "mistral_large3": mistral_large3_family, LARGE4: mistral_large4_family,
    "deepseek_v4": v4_family, "minimax_m3": minimax_m3_family, "kimi_k3": k3_family, "ling_v2_5": ling_family,
    "ling_v2": ling_v2_family, "mimo": mimo_family,
    "deepseek_v41": v41_family, "deepseek_v41_fp4": v41_fp4_family,
    "glm5_next": pooled_family, "qwen4_exp": qwen4_family,
}  # fmt: skip


def text_prompts(seed: int, count: int, longest: int) -> list[Prompt]:
    """Lengths from 1 to `longest`; some share a prefix with another."""
    rng = random.Random(seed)
    prefix = [rng.randrange(ORDINARY) for _ in range(longest // 3)]
    lengths = [1, 2, longest, *(rng.randint(3, longest) for _ in range(count - 3))][:count]
    made = [[rng.randrange(ORDINARY) for _ in range(length)] for length in lengths]
    made = [(prefix + own)[: len(own)] if i % 4 == 3 else own for i, own in enumerate(made)]
    return [Prompt(ids, ids) for ids in made]


def image_prompts(
    seed: int, count: int, longest: int, process: Callable[[Any], Pixels],
    placeholder: Marks, side: int,
) -> list[Prompt]:  # fmt: skip
    """Two of three have 1 to `MAX_IMAGES` of four images, up to `side` pixels wide, in a text of `longest` tokens and
    less: prompts share images and prefixes."""
    rng = random.Random(seed)
    pictures = [random_picture(rng.randint(8, side), rng.randint(8, side), rng.randrange(1000)) for _ in range(4)]
    known = [(address(picture), process(picture)) for picture in pictures]
    before, image, behind = placeholder
    made = []
    for i, prompt in enumerate(text_prompts(seed, count, longest)):
        ids, whole, chosen = [], [], []
        places = sorted(rng.randint(0, len(prompt.ids)) for _ in range(rng.randint(1, MAX_IMAGES) if i % 3 else 0))
        begin = 0
        for place in places:
            data, one = known[rng.randrange(4)]
            if len(whole) + len(prompt.ids) - begin + one.num_tokens > longest + longest // 2:
                break
            ids += [*prompt.ids[begin:place], *before, image, *behind]
            whole += [*prompt.ids[begin:place], *before, *one.placeholders(image), *behind]
            chosen.append((data, one))
            begin = place
        ids, whole = ids + prompt.ids[begin:], whole + prompt.ids[begin:]
        made.append(Prompt(ids, whole, [one for _, one in chosen], [data for data, _ in chosen]))
    return made


def address(picture: Any) -> str:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
