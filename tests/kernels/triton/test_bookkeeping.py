"""The quick conversions of `bookkeeping.py` make the operands of Triton's own conversions, or raise as they do."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.kernels.triton.bookkeeping import arithmetic, cast, numpy_type, operands, patch_lang

OWN = TritonSemantic(interpreter.interpreter_builder)
KINDS = (
    tl.int1, tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float8e4nv, tl.float8e5,
    tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.pointer_type(tl.float32), tl.pointer_type(tl.int32),
)  # fmt: skip
SHAPES = ((), (4,), (1, 4), (2, 1), (2, 4), (2, 8))
GET_ITEM = getattr(tl.tensor.__getitem__, "__wrapped__", tl.tensor.__getitem__)
NUMBERS = (0, 1, True, False, -1, 200, 1 << 31, 1 << 40, 0.0, -0.0, 1.0, 0.1, -2.5, float("inf"))
USES: dict[str, tuple[bool, ...]] = {
    "add": (True, True), "sub": (True, False), "mul": (), "compare": (True, True, False),
    "div": (False, False, True, True),
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_in_a_kernel() -> Iterator[None]:
    patches = patch_lang(drawn)
    yield
    patches.restore()


def drawn(rng: random.Random) -> Any:
    if rng.random() < 0.3:
        return rng.choice(NUMBERS)
    kind, shape = rng.choice(KINDS), rng.choice(SHAPES)
    data = np.array([rng.randrange(2) for _ in range(int(np.prod(shape)))], dtype=numpy_type(kind)).reshape(shape or 1)
    return tl.tensor(interpreter.TensorHandle(data, kind), tl.block_type(kind, [*shape]) if shape else kind)


def shown(convert: Any, *given: Any) -> Any:
    try:
        made = convert(*given)
    except Exception as error:  # of two numbers, of a pointer and a fraction
        return type(error)
    return [
        (str(x.type), str(x.dtype), str(x.shape), x.handle.data.dtype, x.handle.data.shape, x.handle.data.tobytes())
        for x in made
    ]


@pytest.mark.parametrize("use", USES)
def test_operands_are_those_of_triton(use: str) -> None:
    rng, raised = random.Random(random.randrange(1 << 30)), 0
    for _ in range(400):
        lhs, rhs = drawn(rng), drawn(rng)
        want = shown(OWN.binary_op_type_checking_impl, lhs, rhs, *USES[use])
        assert shown(operands, lhs, rhs, *USES[use]) == want, (use, lhs, rhs)
        raised += isinstance(want, type)
    assert 0 < raised < 300


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_sums_and_products_are_those_of_triton(name: str) -> None:
    own, rng, made = getattr(OWN, name), random.Random(random.randrange(1 << 30)), 0
    quick = arithmetic(name, own)
    for _ in range(1000):
        lhs, rhs, checks = drawn(rng), drawn(rng), rng.random() < 0.5
        want, found = (shown(lambda *given, of=one: [of(*given)], lhs, rhs, checks) for one in (own, quick))
        assert found == want, (name, lhs, rhs)
        made += not isinstance(want, type)
        if tl.tensor in (type(lhs), type(rhs)):
            found = shown(lambda *given: [getattr(operator, name)(*given)], lhs, rhs)
            assert found == shown(lambda *given: [own(*given, True)], lhs, rhs), (name, lhs, rhs)
    assert made > 300


def test_casts_are_those_of_triton() -> None:
    rng, made = random.Random(random.randrange(1 << 30)), 0
    for _ in range(2000):
        value, kind = drawn(rng), rng.choice(KINDS)
        if type(value) is not tl.tensor:
            continue
        want, found = (shown(lambda *given, of=one: [of(*given)], value, kind) for one in (OWN.cast, cast))
        assert found == want, (value, kind)
        made += not isinstance(want, type)
    assert made > 300


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), None), (None, slice(None)), (None, slice(None), slice(None)), (slice(None), None, slice(None)),
        (slice(None), slice(None), None), (slice(None), slice(None), slice(None)), (slice(0, 1), None), (0,),
    ],
)  # fmt: skip
def test_dimensions_are_those_of_triton(index: tuple[Any, ...]) -> None:
    own, rng = GET_ITEM, random.Random(random.randrange(1 << 30))
    for _ in range(50):
        value = drawn(rng)
        if type(value) is tl.tensor:
            want = shown(lambda *given: [own(*given, _semantic=OWN)], value, index)
            assert shown(lambda x, place: [x[place]], value, index) == want, (value, index)


@pytest.mark.parametrize("kind", [tl.float32, tl.float64], ids=str)
def test_constants_are_apart(kind: Any) -> None:
    """Equal numbers of other types or signs, after each other."""
    x = tl.tensor(interpreter.TensorHandle(np.ones(4, numpy_type(kind)), kind), tl.block_type(kind, [4]))
    for number in (0.0, -0.0, 0, False, -0.0, 0.0):
        assert shown(operands, x, number) == shown(OWN.binary_op_type_checking_impl, x, number)
