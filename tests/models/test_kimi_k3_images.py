"""Images of Kimi K3: tower, logits and requests against the formulas; config, transparent pixels, sizes in prompts."""

from __future__ import annotations

import io
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_engine.errors import ConfigError
from moe_engine.media.image_process import _processed, load_processor
from moe_engine.media.images import Picture, SizeTexts, place_images
from moe_engine.models.config_file import load_model_config
from moe_engine.models.families.image_text import ImageInputs
from moe_engine.models.vision.kimi_pixels import KimiProcessor
from moe_engine.tokenizer.kimi_k3 import KimiK3Chat
from tests.models import stepper
from tests.models.image_parity import around, check_logits, check_requests, clear_prompts
from tests.models.kimi_k3 import IMAGE, PATCH, VISION, make_k3
from tests.models.kimi_k3_tower import K3Oracle
from tests.models.published import KIMI_K3
from tests.models.rows import all_rows
from tests.models.test_kimi_k3 import BOUND
from tests.models.test_parity import assert_close
from tests.models.vision_checkpoints import noise_pixels


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> K3Oracle:
    return K3Oracle(make_k3(tmp_path_factory.mktemp("k3"), random.randrange(2**31), tokenizer=False, vision=VISION))


picture = partial(noise_pixels, patch_width=3 * PATCH**2)


@pytest.mark.parametrize("row", all_rows())
def test_logits(made: K3Oracle, row: str) -> None:
    prompt, text = clear_prompts(made, lambda: picture(3, 4), IMAGE)
    loaded, (image,) = stepper.load(made.path, row), prompt[2]
    assert isinstance(loaded.model, ImageInputs)
    rows = loaded.model.encode(image.values, image.grid)
    assert_close(rows, made.embed(image))
    assert_close(loaded.model.encode((other := picture(1, 2)).values, other.grid), made.embed(other))
    check_logits(loaded, made.path, row, made, prompt, rows, IMAGE, BOUND, text)


def test_requests(made: K3Oracle, tmp_path: Path) -> None:
    first, second = picture(2, 3), picture(4, 1)
    asked = [(*around(images, IMAGE), images) for images in ([first], [first, second], [])]
    check_requests(made.path, made, asked, tmp_path / "status")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"norm_type": "layernorm"}, "norm_type"), ({"mm_projector_type": "mlp"}, "mm_projector_type"),
     ({"qkv_hidden_size": 25}, "vt_num_attention_heads"), ({"mm_hidden_size": 8}, "mm_hidden_size")],
)  # fmt: skip
def test_other_towers_are_refused(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    raw = KIMI_K3 | {"vision_config": KIMI_K3["vision_config"] | wrong}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)


def test_published_tower(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K3))
    vision = load_model_config(tmp_path).vision
    assert vision is not None and (vision.head_dim, vision.merged_width, vision.out_width) == (128, 4096, 7168)
    assert (vision.num_positions, vision.image_token, vision.projector_eps) == (64**2, 163605, 1e-5)


BOARD = {
    "pattern": "chessboard", "chessboard_square_size": 8, "chessboard_square_on_top_left": True,
    "chessboard_white_value": 255, "chessboard_gray_value": 180,
}  # fmt: skip


def test_transparent_pixels(tmp_path: Path) -> None:
    """They are on a chessboard whose squares are not resized; images without transparency are as in Kimi K2.5."""
    image_module = pytest.importorskip("PIL.Image", reason="images need pillow: pip install -e '.[vision]'")
    own = {"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 16, "transparent_bg_config": BOARD}
    fields = {"media_proc_cfg": own | {"transparent_bg_fill_stage": "after_resize"}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    processor = load_processor(str(tmp_path))
    alpha = np.zeros((112, 112, 4), dtype=np.uint8)
    alpha[:, 56:] = (10, 20, 30, 255)
    done = _processed(processor, 1 << 20, encoded(image_module.fromarray(alpha)))
    assert done.problem is None and done.grid == (1, 4, 4) and done.size == (112, 112)
    values = np.frombuffer(done.pixels, np.float32).reshape(4, 4, 3, 14, 14).transpose(0, 3, 1, 4, 2)
    whole = (values.reshape(56, 56, 3) + 1) * 127.5
    squares = np.where(np.add.outer(np.arange(56) // 8, np.arange(56) // 8) % 2, 180, 255)
    assert np.allclose(whole[:, :24, 0], squares[:, :24], atol=0.01)
    assert np.allclose(whole[:, 32:], (10, 20, 30), atol=0.01)
    plain = encoded(image_module.fromarray(alpha[..., :3]))
    assert _processed(processor, 1 << 20, plain).pixels == _processed(
        KimiProcessor.of({"media_proc_cfg": own | {"transparent_bg_config": None}}), 1 << 20, plain
    ).pixels  # fmt: skip
    with pytest.raises(ConfigError, match="pattern 'stripes' is not supported"):
        KimiProcessor.of({"media_proc_cfg": {"transparent_bg_config": {"pattern": "stripes"}}})


def encoded(image: Any) -> bytes:
    image.save(out := io.BytesIO(), "PNG")
    return out.getvalue()


def test_sizes_in_prompts(made: K3Oracle) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    text = KimiK3Chat().render([{"role": "user", "content": parts}])
    assert "a<|media_begin|><|media_content|><|media_pad|><|media_end|>b<|close|>" in text
    vision = load_model_config(made.path).vision
    assert vision is not None
    sizes = SizeTexts(1, 2, lambda text: [*text.encode()])
    given = [Picture(b"x", (1, 2, 4), b"", (640, 48)), Picture(b"y", (1, 2, 2), b"", (3, 4))]
    ids, images = place_images([9, 1, 2, IMAGE, 5, IMAGE], given, vision, "text", sizes)
    written = [*b"image 640x48"]
    assert ids == [9, 1, *written, 2, IMAGE, IMAGE, 5, IMAGE]
    assert [(image.start, image.count) for image in images] == [(3 + len(written), 2), (6 + len(written), 1)]
