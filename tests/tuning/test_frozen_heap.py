"""A load's client without full garbage collections of what existed before."""

from __future__ import annotations

import gc

import pytest

from moe_engine.tuning.frozen_heap import frozen_heap


def test_objects_from_before_are_not_scanned_until_the_end() -> None:
    before: list[list[int]] = [[]]
    with pytest.raises(RuntimeError), frozen_heap():
        scanned = {id(one) for one in gc.get_objects()}
        assert id(before) not in scanned
        new: list[list[int]] = [[]]
        assert id(new) in {id(one) for one in gc.get_objects()}
        raise RuntimeError
    assert id(before) in {id(one) for one in gc.get_objects()}
