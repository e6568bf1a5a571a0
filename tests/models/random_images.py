"""Random towers and images of the families for images and text, against transformers:
``python -m tests.models.random_images --count 50``.

A checkpoint has drawn heads, widths, patches, tokens of drawn numbers of patches, windows, positions, deepstack layers,
activations; a prompt has up to four images of drawn sides, single rows and columns among them. Logits of chunks, which
may end inside an image, are those of transformers' own model, of DeepSeek V4.1 and Kimi K3 those of the formulas.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.models.batch import ImageRows, PoolStarts
from moe_engine.models.config_file import load_model_config
from moe_engine.models.families.image_text import ImageInputs
from moe_engine.models.vision.positions import axis_positions
from tests.models import (
    cohere2_images,
    gemma3_images,
    glm5_next_images,
    kimi_checkpoints,
    kimi_k3,
    kimi_k3_tower,
    llama4_images,
    minimax_m3_images,
    mistral3_checkpoints,
    mistral_native,
    random_reference_shapes,
    random_sparse_shapes,
    sparse,
    stepper,
    v41_images,
    v41_tower,
    vision_checkpoints,
)
from tests.models.checkpoints import GATED_STREAMS
from tests.models.deepseek_v41 import make_v41
from tests.models.qwen4_exp_images import make_qwen4
from tests.models.random_shapes import TOLERANCE, Refused, run_draws
from tests.models.vision_checkpoints import GLM, GreedyOracle, Oracle, Pixels

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", *GLM)
MISTRAL = ("mistral", "ministral3", "mistral4", "mistral_large3", "pixtral")
COHERE2, GEMMA3 = "cohere2_vision", "gemma3_vision"
KINDS = (*QWEN, *MISTRAL, "kimi_k25", "llama4", COHERE2, GEMMA3, "minimax_m3", "glm5_next", GATED_STREAMS)
FORMULAS = ("deepseek_v41", "kimi_k3")
IMAGES: dict[str, int] = {
    **dict.fromkeys(QWEN, vision_checkpoints.IMAGE), **dict.fromkeys(MISTRAL, mistral3_checkpoints.IMAGE),
    "llama4": llama4_images.IMAGE, COHERE2: cohere2_images.IMAGE,
    GEMMA3: gemma3_images.IMAGE,
    "kimi_k25": kimi_checkpoints.IMAGE, "minimax_m3": minimax_m3_images.IMAGE, "glm5_next": vision_checkpoints.IMAGE,
    GATED_STREAMS: vision_checkpoints.IMAGE, "deepseek_v41": v41_tower.IMAGE, "kimi_k3": kimi_k3.IMAGE,
}  # fmt: skip
MARGIN = 5e-6


@dataclass
class Shape:
    """A drawn checkpoint: fields of tower and text model, further arguments of its maker; the sides of the images, in
    tokens or tiles; patches of a token in one direction, frames of a patch, patches of a tile in one direction."""

    kind: str
    row: str
    tower: dict[str, Any]
    text: dict[str, Any]
    sides: list[tuple[int, int]]
    patch: int
    merge: int = 2
    frames: int = 2
    tile: int = 0
    stored: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Drawn(Pixels):
    """An image with `merge` x `merge` patches a token; `breaks`: tokens after its rows; `delimited`: by tokens of the
    tower; `tile`: patches of a tile."""

    merge: int
    breaks: bool
    delimited: bool
    tile: int

    def placeholders(self, image: int) -> list[int]:
        if self.tile and image == cohere2_images.IMAGE:
            return cohere2_images.tokens_of(self.grid, self.tile, self.merge)
        if self.tile:
            return llama4_images.tokens_of(self.grid, self.tile, self.merge)
        rows, columns = (-(-side // self.merge) for side in self.grid[1:])
        if self.delimited:
            return [image] * (rows * (columns + 1) + 2)
        if not self.breaks:
            return [image] * (rows * columns)
        lines = [*[image] * columns, mistral3_checkpoints.BREAK] * rows
        return [*lines[:-1], mistral3_checkpoints.END]


def draw(kind: str, rng: random.Random) -> Shape:
    heads, layers = rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    width = heads * rng.choice((8, 12, 16, 20, 40))
    rare = rng.choice(((1, 1), (1, 17), (19, 1), (2, 9)))
    sides = [rng.choice((rare, (rng.randint(1, 6), rng.randint(1, 6)))) for _ in range(rng.randint(1, 4))]
    shape = Shape(kind, rng.choice(("torch", "cpu")), {}, _text(kind, rng), sides, rng.choice((2, 4, 5, 14)))
    inner = rng.choice((20, 37, 64))
    if kind in (*QWEN, GATED_STREAMS):
        shape.merge = rng.choice((1, 2, 2, 3))
        _qwen(shape, rng, heads, layers, width, inner)
    elif kind == "glm5_next":
        shape.tower = {
            "num_heads": heads, "depth": layers, "hidden_size": width, "intermediate_size": inner,
            "swiglu_limit": rng.choice((0.5, 10.0)), "attention_bias": rng.random() < 0.5,
            "projection_intermediate_size": rng.choice((33, 64)), "rms_norm_eps": rng.choice((1e-6, 1e-3)),
        }  # fmt: skip
        shape.patch = 14
    elif kind in FORMULAS:
        _of_formulas(shape, rng, heads, layers, inner)
    else:
        shape.tower = {
            "num_attention_heads": heads, "num_hidden_layers": layers, "hidden_size": width,
            "intermediate_size": inner, "patch_size": shape.patch,
        }  # fmt: skip
        if kind == "kimi_k25":
            side = rng.choice((3, 4, 6))
            shape.tower |= {"pos_emb_height": side, "pos_emb_width": side, "merge_kernel_size": [shape.merge] * 2}
            shape.frames = 1
        elif kind == "llama4":
            _tiles(shape, rng)
        elif kind == COHERE2:
            _tiles_of_cohere2(shape, rng)
        elif kind == GEMMA3:
            shape.merge, shape.frames = rng.choice((1, 2, 4)), 1
            side = rng.choice((1, 2, 3))
            shape.tower |= {"image_size": side * shape.merge * shape.patch, "mm_tokens_per_image": side**2}
            shape.sides = [(side, side)] * rng.randint(1, 3)
        elif kind == "minimax_m3":
            shape.merge = shape.tower["spatial_merge_size"] = rng.choice((1, 2, 3))
            shape.tower |= {"layer_norm_eps": rng.choice((1e-6, 1e-3)), "image_size": 32 * shape.patch}
        else:
            shape.merge, shape.frames = 1 if kind == "pixtral" else rng.choice((1, 2, 3)), 1
            theta = {"rope_type": "axial", "rope_theta": rng.choice((100.0, 1e4))}
            shape.tower |= {"image_size": 64 * shape.patch, "rope_parameters": theta}
            if kind != "pixtral":
                shape.stored = {"bias": rng.random() < 0.5, "act": rng.choice(("silu", "gelu")), "merge": shape.merge}
    return shape


def _tiles(shape: Shape, rng: random.Random) -> None:
    shape.merge, shape.frames, shape.sides = rng.choice((1, 2, 4)), 1, [rng.choice(((1, 1), (2, 1), (1, 3), (2, 2)))]
    shape.tile, inner = shape.merge * rng.choice((1, 2, 3)), rng.choice((20, 37, 64))
    shape.tower |= {
        "image_size": shape.tile * shape.patch, "pixel_shuffle_ratio": 1 / shape.merge,
        "intermediate_size": shape.tower["hidden_size"] * shape.merge**2, "rope_theta": rng.choice((100.0, 1e4)),
        "projector_input_dim": inner, "projector_output_dim": inner, "vision_output_dim": inner,
    }  # fmt: skip


def _tiles_of_cohere2(shape: Shape, rng: random.Random) -> None:
    shape.merge, shape.frames, shape.sides = rng.choice((1, 2, 4)), 1, [rng.choice(((1, 1), (2, 1), (1, 3), (2, 2)))]
    shape.tile = shape.merge * rng.choice((1, 2, 3))
    shape.tower |= {
        "image_size": shape.tile * shape.patch, "downsample_factor": shape.merge,
        "alignment_intermediate_size": rng.choice((20, 38, 64)), "layer_norm_eps": rng.choice((1e-6, 1e-3)),
    }  # fmt: skip


def _of_formulas(shape: Shape, rng: random.Random, heads: int, layers: int, inner: int) -> None:
    width, shape.frames, shape.patch = heads * rng.choice((4, 8, 12)), 1, 2
    if shape.kind == "deepseek_v41":
        shape.merge = rng.choice((1, 2, 3))
        shape.tower = v41_tower.VISION | {
            "hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers, "intermediate_size": inner,
            "downsample_ratio": shape.merge, "rope_theta": rng.choice((100.0, 1e4)),
        }  # fmt: skip
        return
    own, side = rng.choice((16, 20)), rng.choice((3, 5, 6))
    shape.tower = kimi_k3.VISION | {
        "qkv_hidden_size": width, "vt_num_attention_heads": heads, "vt_num_hidden_layers": layers,
        "vt_intermediate_size": inner, "vt_hidden_size": own, "mm_hidden_size": own,
        "init_pos_emb_height": side, "init_pos_emb_width": side,
        "text_hidden_size": shape.text["hidden_size"], "projector_ln_eps": rng.choice((1e-5, 1e-3)),
    }  # fmt: skip


def _qwen(shape: Shape, rng: random.Random, heads: int, layers: int, width: int, inner: int) -> None:
    tower = {
        "depth": layers, "hidden_size": width, "num_heads": heads, "intermediate_size": inner,
        "patch_size": shape.patch, "spatial_merge_size": shape.merge, "out_hidden_size": shape.text["hidden_size"],
    }  # fmt: skip
    if shape.kind == "qwen2_vl":
        tower |= {"embed_dim": width, "hidden_size": shape.text["hidden_size"], "mlp_ratio": rng.choice((1, 2, 3))}
    elif shape.kind == "qwen2_5_vl":
        token = shape.patch * shape.merge
        tower |= {"window_size": token * rng.choice((1, 2, 3)) + rng.choice((0, 1))}
        tower |= {"fullatt_block_indexes": sorted(rng.sample(range(layers), rng.randint(0, layers)))}
    elif shape.kind in GLM:
        tower |= {"image_size": shape.patch * rng.choice((1, 2, 5, 6)), "attention_bias": rng.random() < 0.5}
        tower |= {"rms_norm_eps": rng.choice((1e-6, 1e-3)), "temporal_patch_size": 2}
    else:
        tower |= {"num_position_embeddings": rng.choice((4, 9, 16, 36))}
        if not shape.kind.startswith("qwen3_5") and shape.kind != GATED_STREAMS:
            deep = sorted(rng.sample(range(layers), rng.randint(0, min(layers, shape.text["num_hidden_layers"]))))
            tower["deepstack_visual_indexes"] = deep
    shape.tower = tower


def _text(kind: str, rng: random.Random) -> dict[str, Any]:
    if kind in FORMULAS:
        return random_reference_shapes.draw(kind, rng).fields
    text: dict[str, Any] = {"hidden_size": rng.choice((48, 72)), "num_hidden_layers": rng.choice((2, 3))}
    if kind == "glm5_next":
        return {"hidden_size": text["hidden_size"]}
    if kind == GATED_STREAMS:
        return text | random_sparse_shapes.streams(rng, text["num_hidden_layers"])
    if kind in ("kimi_k25", "mistral4", "mistral_large3", "minimax_m3"):
        return text if kind != "minimax_m3" else text | {"num_hidden_layers": 3}
    kv, head = rng.choice((1, 2, 3)), rng.choice((8, 16, 24))
    text |= {"num_key_value_heads": kv, "num_attention_heads": kv * rng.choice((1, 2)), "head_dim": head}
    text["tie_word_embeddings"] = rng.random() < 0.3
    if kind == "llama4":
        return text | {"tie_word_embeddings": False}
    if kind == COHERE2:
        kinds = [rng.choice(("sliding_attention", "full_attention")) for _ in range(text["num_hidden_layers"])]
        return text | {"tie_word_embeddings": True, "layer_types": kinds, "logit_scale": rng.choice((0.25, 1.0))}
    if kind == GEMMA3:
        kinds = [rng.choice(("sliding_attention", "full_attention")) for _ in range(text["num_hidden_layers"])]
        return text | {"tie_word_embeddings": True, "layer_types": kinds, "sliding_window": rng.choice((1, 3, 8, 30))}
    if kind not in QWEN:
        return text
    if kind.startswith("qwen2"):
        text.pop("head_dim")
        text["hidden_size"] = text["num_attention_heads"] * head
        text |= {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1} if rng.random() < 0.2 else {}
    if kind == "glm4v":  # transformers' class derives the width of heads
        text.pop("head_dim")
        text["hidden_size"] = text["num_attention_heads"] * head
    elif kind == "glm4v_moe":
        text |= {"attention_bias": rng.random() < 0.5, "routed_scaling_factor": rng.choice((1.0, 2.5))}
    part = rng.choice((0.5, 1.0)) if kind in GLM else 1.0
    half = head // 2 // (2 if kind.startswith("qwen3_5") or part < 1 else 1)
    rows = columns = rng.randint(1, max(1, half // 3))
    rope = {"rope_type": "default", "mrope_section": [half - rows - columns, rows, columns]}
    if kind in GLM:
        text |= {"rope_scaling": rope, "partial_rotary_factor": part}
    elif kind.startswith("qwen3"):
        text["rope_scaling"] = rope | {"mrope_interleaved": True}
    else:
        yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_type": "yarn"}
        text["rope_scaling"] = rope | rng.choice(({}, {"type": "mrope", "rope_type": "default"}, yarn))
    return text


def make(shape: Shape, path: Path, seed: int) -> tuple[Path, GreedyOracle]:
    if shape.kind in QWEN:
        made = vision_checkpoints.make_checkpoint(shape.kind, path, seed, tower=shape.tower, **shape.text)
        return made, Oracle(made)
    if shape.kind == GATED_STREAMS:
        made = make_qwen4(path, seed, tower=shape.tower, **shape.text)
        return made, Oracle(made)
    if shape.kind == "glm5_next":
        return path, glm5_next_images.make_glm(path, seed, shape.tower, **shape.text)
    if shape.kind == "deepseek_v41":
        made = make_v41(path, seed, vision=shape.tower, **shape.text)
        return made, v41_images.V41Oracle(made)
    if shape.kind == "kimi_k3":
        made = kimi_k3.make_k3(path, seed, vision=shape.tower, **shape.text)
        return made, kimi_k3_tower.K3Oracle(made)
    if shape.kind == "minimax_m3":
        return path, minimax_m3_images.make_minimax_m3(path, seed, shape.tower, **shape.text)
    if shape.kind == "llama4":
        return path, llama4_images.make_llama4(path, seed, shape.tower, **shape.text)
    if shape.kind == GEMMA3:
        return path, gemma3_images.make_gemma3(path, seed, shape.tower, **shape.text)
    if shape.kind == COHERE2:
        return path, cohere2_images.make_cohere2(path, seed, shape.tower, **shape.text)
    if shape.kind == "kimi_k25":
        return path, kimi_checkpoints.make_kimi(path, seed, tower=shape.tower, **shape.text)
    if shape.kind == "pixtral":
        return path, mistral3_checkpoints.make_pixtral(path, seed, shape.tower, **shape.text)
    given = shape.stored | shape.text
    if shape.kind == "mistral_large3":
        return path, mistral_native.make_mistral_large3(path, seed, tower=shape.tower, **given | {"act": "silu"})
    return path, mistral3_checkpoints.make_mistral3(path, seed, shape.kind, tower=shape.tower, **given)


def prompt(shape: Shape, rng: random.Random) -> tuple[list[int], list[int], list[Drawn]]:
    """Tokens, places of the images, the images."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    ids, places, images = [rng.randrange(250) for _ in range(rng.randint(0, 9))], [], []
    for rows, columns in shape.sides:
        grid = (1, rows * shape.merge, columns * shape.merge)
        if shape.kind == "deepseek_v41":  # tokens at the edges have fewer patches
            grid = (1, *(max(1, side - rng.randrange(shape.merge)) for side in grid[1:]))
        patches = grid[1] * grid[2]
        if shape.tile:
            grid = (1, rows * shape.tile, columns * shape.tile)
            patches = (rows * columns + (rows * columns > 1)) * shape.tile**2
        values = torch.randn((patches, 3, 1, shape.patch**2), generator=generator)
        whole = values.expand(-1, -1, shape.frames, -1).flatten(1).contiguous()
        image = Drawn(grid, whole, shape.merge, shape.kind in MISTRAL, shape.kind == "deepseek_v41", shape.tile)
        ids += [vision_checkpoints.START] if shape.kind in (*QWEN, GATED_STREAMS) else []
        places.append(len(ids))
        images.append(image)
        ids += image.placeholders(IMAGES[shape.kind])
        ids += [rng.randrange(250) for _ in range(rng.choice((1, 1, 2, 13)))]
    return ids, places, images


def check(shape: Shape, folder: Path, seed: int) -> float:
    """The largest relative error of a token's logits. Raises Refused."""
    rng = random.Random(seed)
    try:
        path, oracle = make(shape, folder, seed)
        given, want = _clear(lambda: _asked(shape, oracle, rng), oracle)
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    got = _logits(shape, path, *given, rng)
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def _asked(shape: Shape, oracle: GreedyOracle, rng: random.Random) -> tuple[Any, Tensor]:
    given = prompt(shape, rng)
    return given, oracle.logits(given[0], list(given[2]))


def _clear(draw: Callable[[], tuple[Any, Tensor]], oracle: GreedyOracle) -> tuple[Any, Tensor]:
    """A draw whose experts rounding does not decide, if the model has experts."""
    for _ in range(20):
        drawn, margin = sparse.with_margin(draw, needed=False)
        (ids, _, images), _ = drawn
        if margin <= MARGIN:
            continue
        if not isinstance(oracle, v41_images.V41Oracle) or oracle.is_clear(ids, images, MARGIN):
            return drawn
    raise AssertionError("no clear selections in 20 draws")


def _logits(
    shape: Shape, path: Path, ids: list[int], places: list[int], images: list[Drawn], rng: random.Random
) -> Tensor:
    config = load_model_config(path)
    assert config.vision is not None
    more = {"max_positions": 256, "max_image_tokens": len(ids)} if config.rope.axes else {}
    loaded = stepper.load(path, shape.row, page_size=config.page_multiple, **more)
    model = loaded.model
    assert isinstance(model, ImageInputs)
    rows, is_image = torch.zeros(len(ids), config.vision.row_width), torch.zeros(len(ids), dtype=torch.bool)
    owners = torch.full((len(ids),), -1)
    for i, (place, image) in enumerate(zip(places, images)):
        own = model.encode(image.values, image.grid)
        owners[place : place + len(own)] = i
        rows[place : place + len(own)], is_image[place : place + len(own)] = own, True
    axes = torch.arange(len(ids)).expand(3, -1)
    if config.rope.axes:
        found, _ = axis_positions(len(ids), list(zip(places, (image.grid for image in images))), shape.merge)
        axes = torch.from_numpy(found)
    ends = sorted({rng.randint(1, len(ids)) for _ in range(3)} | {len(ids), max(1, len(ids) - 1)})
    if config.vision.sees_whole:
        ends = [end for end in ends if end == len(ids) or owners[end] < 0 or owners[end] != owners[end - 1]]
    logits = []
    for begin, end in zip([0, *ends], ends):
        batch = loaded.batch([stepper.Chunk(0, ids[begin:end], decode=end == begin + 1)])
        inside = is_image[begin:end].nonzero().flatten()
        batch = replace(batch, positions=axes[:, begin:end].amax(0))
        if config.rope.axes and config.attention.pool > 1:
            places = torch.arange(begin, end)
            first = places // config.attention.pool * config.attention.pool
            batch = replace(batch, pool_starts=PoolStarts(places, axes[:, first].T))
        if len(inside):
            numbers = sorted(set(owners[begin:end].tolist()) - {-1}) if config.vision.sees_whole else []
            spans = [
                ((owners[begin:end] == i).nonzero().flatten().tolist(), int((owners == i).nonzero().max()) + 1)
                for i in numbers
            ]
            own = ImageRows(inside, rows[begin:end][inside], axes[:, begin:end][:, inside], spans=spans)
            batch = replace(batch, images=own)
        logits.append(model.logits(model.forward(batch)))
    return torch.cat(logits)


def _check_within_tolerance(shape: Shape, folder: Path, rng: random.Random, seed: int) -> str:
    found = check(shape, folder, seed)
    assert found < (random_reference_shapes.TOLERANCE if shape.kind in FORMULAS else TOLERANCE), found
    return ""


if __name__ == "__main__":
    run_draws(__doc__, [*KINDS, *FORMULAS], 40, draw, _check_within_tolerance)
