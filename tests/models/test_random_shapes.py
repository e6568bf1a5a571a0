"""Logits of random shapes of random families equal transformers', with fields of config.json left out; of sparse
families; of families with formulas or published formats; of towers with several images; of quantized weights; after a
change of config.json."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_engine.errors import MoeEngineError
from tests.examples import examples
from tests.models import (
    changed_fields,
    random_formats,
    random_images,
    random_reference_shapes,
    random_shapes,
    random_sparse_shapes,
)
from tests.models.checkpoints import KINDS, MORE_KINDS
from tests.models.random_shapes import Refused

SHAPES = [*KINDS, *MORE_KINDS]


def compare(
    kinds: Sequence[str],
    draw: Callable[[str, random.Random], Any],
    check: Callable[[Any, Path, int], float],
    folder: Path,
    wanted: int,
    tolerance: float = random_shapes.TOLERANCE,
) -> None:
    """Draws until as many shapes as wanted are served."""
    compared = 0
    for number in range(8 * wanted):
        shape = draw(random.choice(kinds), random.Random(random.getrandbits(32)))
        try:
            error = check(shape, folder / str(number), random.randrange(2**31))
        except Refused:
            continue
        assert error < tolerance, (error, shape)
        compared += 1
        if compared == wanted:
            return
    raise AssertionError(f"{8 * wanted - compared} of {8 * wanted} shapes were refused")


def test_logits_equal_transformers(tmp_path: Path) -> None:
    compare(SHAPES, random_shapes.draw, random_shapes.check, tmp_path, examples(3))


def test_no_changed_field_is_ignored(tmp_path: Path) -> None:
    compare(SHAPES, changed_fields.draw, changed_fields.check, tmp_path, examples(3))


two_of_these = pytest.mark.drawn(2, group="random shapes of formulas and published formats")
one_of_three = pytest.mark.drawn(1, group="random shapes of parts of models")


@one_of_three
def test_selections_of_tokens_pools_blocks_and_entries(tmp_path: Path) -> None:
    compare(random_sparse_shapes.KINDS, random_sparse_shapes.draw, random_sparse_shapes.check, tmp_path, examples(1))


@two_of_these
@pytest.mark.parametrize("kind", random_reference_shapes.KINDS)
def test_formulas_and_published_formats(tmp_path: Path, kind: str) -> None:
    draw, check = random_reference_shapes.draw, random_reference_shapes.check
    compare([kind], draw, check, tmp_path, examples(1), random_reference_shapes.TOLERANCE)


@two_of_these
@pytest.mark.parametrize("kind", random_images.FORMULAS)
def test_towers_of_formulas(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("PIL", reason="images need pillow: pip install -e '.[vision]'")
    draw, check = random_images.draw, random_images.check
    compare([kind], draw, check, tmp_path, examples(1), random_reference_shapes.TOLERANCE)


@one_of_three
def test_towers_and_several_images(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="images need pillow: pip install -e '.[vision]'")
    compare(random_images.KINDS, random_images.draw, random_images.check, tmp_path, examples(1))


@one_of_three
def test_number_formats(tmp_path: Path) -> None:
    def check(shape: Any, folder: Path, seed: int) -> float:
        try:
            return random_formats.check(shape, folder, seed)
        except MoeEngineError as error:  # a width that the format does not store
            raise Refused(str(error)) from error

    compare(random_formats.SERVED, random_formats.draw, check, tmp_path, examples(1), random_formats.TOLERANCE)
