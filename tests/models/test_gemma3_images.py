"""Gemma 3 with images against transformers: tower, logits, requests in an engine, prompts, pixels, names and config."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.kernels import tables
from moe_engine.kernels.device import Device
from moe_engine.kernels.registry import select
from moe_engine.media.image_process import load_processor
from moe_engine.models.batch import ImageRows
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.families.gemma3 import Gemma3Model
from moe_engine.models.header_check import check_headers
from moe_engine.models.needs import need_of_model
from moe_engine.planning.prepare import prepare
from tests.models import stepper
from tests.models.gemma3_images import IMAGE, NAMES, PATCH, SIDE, START, TOKENS, Gemma3Oracle, make_gemma3, picture
from tests.models.image_parity import around, check_requests
from tests.models.rows import all_rows
from tests.models.test_parity import assert_close


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Gemma3Oracle:
    """A random checkpoint with windows of 20 tokens in every second layer, and transformers' model."""
    return make_gemma3(tmp_path_factory.mktemp("gemma3"), random.randrange(2**31))


@pytest.mark.parametrize("row", all_rows())
@pytest.mark.parametrize("window", [7, 20, 300])
def test_logits_equal_transformers(row: str, window: int, tmp_path: Path) -> None:
    """Two images, in chunks that end before, between and behind them. Windows are shorter than an image, shorter than
    the context, and longer."""
    made = make_gemma3(tmp_path, random.randrange(2**31), sliding_window=window)
    images = [picture(), picture()]
    ids, places = around(images, IMAGE, count=random.randint(5, 12))
    expected = made.logits(ids, list(images))
    loaded = stepper.load(made.path, row)
    model = loaded.model
    assert isinstance(model, Gemma3Model)
    rows, stops = torch.zeros(len(ids), 64), np.zeros(len(ids), dtype=int)
    for image, place in zip(images, places):
        rows[place : place + TOKENS] = model.encode(image.values, image.grid)
        stops[place : place + TOKENS] = place + TOKENS
    got = []
    for begin, end in _chunks(places, len(ids)):
        batch = loaded.batch([stepper.Chunk(0, ids[begin:end], decode=end == begin + 1)])
        inside = np.flatnonzero(stops[begin:end])
        if len(inside):
            spans = [
                (np.flatnonzero(stops[begin:end] == stop).tolist(), int(stop)) for stop in set(stops[begin:end]) - {0}
            ]
            index = torch.from_numpy(inside)
            axes = (index + begin).expand(3, -1)
            batch = replace(batch, images=ImageRows(index, rows[begin:end][index], axes, spans=spans))
        got.append(model.logits(model.forward(batch)))
    assert_close(torch.cat(got), expected)


def _chunks(places: list[int], length: int) -> list[tuple[int, int]]:
    first, second = places
    edges = random.choice(
        ([0, length - 1, length], [0, first, first + TOKENS, second, length], [0, second, length - 2, length])
    )
    return list(pairwise(edges))


@pytest.mark.parametrize(
    "tower",
    [
        {"hidden_size": 36, "num_attention_heads": 3, "image_size": 6 * PATCH, "mm_tokens_per_image": 9},
        {"num_hidden_layers": 1, "mm_tokens_per_image": 64, "layer_norm_eps": 0.1, "vision_use_head": True},
    ],
)
def test_towers(tower: dict[str, Any], tmp_path: Path) -> None:
    made = make_gemma3(tmp_path, random.randrange(2**31), tower)
    image = picture(tower.get("image_size", SIDE * PATCH) // PATCH)
    model = stepper.load(made.path, "cpu").model
    assert isinstance(model, Gemma3Model)
    with torch.no_grad():
        want = made.model.get_image_features(made.image_inputs([], [image])["pixel_values"]).pooler_output[0]
    assert_close(model.encode(image.values, image.grid), want)
    check_headers(made.path, read_checkpoint(made.path), load_model_config(made.path))


def test_requests(made: Gemma3Oracle, tmp_path: Path) -> None:
    """Chunks would end inside images; two images are two prefixes; an image first and last."""
    first, second, same = picture(), picture(), picture()
    asked = [(*around(images, IMAGE, 20), images) for images in ([first], [first, second], [same], [])]
    tokens, places, _ = asked[0]
    asked[2] = (tokens, places, [same])
    asked.append(([*[IMAGE] * TOKENS, 7, 8], [0], [second]))
    asked.append(([7, 8, *[IMAGE] * TOKENS], [2], [first]))
    check_requests(made.path, made, asked, tmp_path / "status")


def test_pixels(made: Gemma3Oracle) -> None:
    image_module = pytest.importorskip("PIL.Image", reason="images need pillow: pip install -e '.[vision]'")
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    config = prepare(EngineArgs.from_kwargs(model_path=str(made.path), max_total_tokens=64))
    assert config.model.vision is not None and config.model.vision.max_patches == SIDE**2
    height, width = random.randint(5, 90), random.randint(5, 90)
    values = np.random.default_rng(random.getrandbits(32)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = image_module.fromarray(values)
    (want,) = Gemma3ImageProcessorPil.from_pretrained(made.path)([image], return_tensors="np")["pixel_values"]
    got = load_processor(str(made.path))([image], return_tensors="np")
    assert got["image_grid_thw"].tolist() == [[1, SIDE, SIDE]]
    whole = got["pixel_values"].reshape(SIDE, SIDE, 3, PATCH, PATCH).transpose(2, 0, 3, 1, 4).reshape(want.shape)
    assert np.array_equal(whole, want)


def test_headers_and_sizes(made: Gemma3Oracle) -> None:
    """All tensors are known by the names of the files; the tower takes the memory of the ledger."""
    config, files = load_model_config(made.path), read_checkpoint(made.path)
    check_headers(made.path, files, config)
    args: dict[str, Any] = {"model_path": str(made.path), "dtype": "float32", "max_total_tokens": 64}
    whole, alone = (
        prepare(EngineArgs.from_kwargs(**args, language_model_only=alone)).ledger.bytes_of("weights")
        for alone in (False, True)
    )
    tower = sum(file.tensors[name].num_bytes for name, file in files.items() if name.startswith("visual."))
    assert whole - alone == pytest.approx(tower, rel=2e-2)
    del files["visual.projector.mm_soft_emb_norm.weight"]
    with pytest.raises(CheckpointError, match=r"mm_soft_emb_norm.weight .* is missing"):
        check_headers(made.path, files, config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"chunked_prefill_size": 15}, "--chunked-prefill-size 15: the tokens of an image .* give at least 16"),
        ({"page_size": 16}, "--page-size 16: the tokens of an image"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk: the tokens of an image"),
    ],
)
def test_refused_flags(made: Gemma3Oracle, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(EngineArgs.from_kwargs(model_path=str(made.path), max_total_tokens=64, **flags))
    prepare(EngineArgs.from_kwargs(model_path=str(made.path), max_total_tokens=64, language_model_only=True, **flags))


def test_rows_without_lists_of_slots_are_refused(made: Gemma3Oracle) -> None:
    need = need_of_model(load_model_config(made.path), "bfloat16")
    with pytest.raises(ValueError, match="no attention among all tokens of an image"):
        select("attention", tables.GQA, "fa3", Device("cuda", "H100", (9, 0)), need)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vision_config": {"hidden_act": "gelu"}}, "hidden_act 'gelu' is not supported"),
        ({"vision_config": {"num_attention_heads": 7}}, "num_attention_heads 7 does not divide 24"),
        ({"mm_tokens_per_image": 9}, "mm_tokens_per_image 9 is no square of a divisor"),
    ],
)
def test_refused_towers(made: Gemma3Oracle, wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = json.loads((made.path / "config.json").read_text())
    merged = raw | wrong | {"vision_config": raw["vision_config"] | wrong.get("vision_config", {})}
    (tmp_path / "config.json").write_text(json.dumps(merged))
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)
    assert NAMES[START] == "<start_of_image>"
