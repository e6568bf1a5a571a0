"""Integers of 32 bits in addresses: finds sums and products that exceed them for the largest tensors of a GPU.

The bounds of an address follow from its instructions in Triton's first representation, before optimization for a
device. A kernel must widen such a factor to int64 before it multiplies.

``python -m tests.kernels.triton.address_bounds PART PARTS`` prints findings of one case of each kernel as JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import Language
from triton.compiler.compiler import make_backend

from moe_engine.kernels.triton.aot import AotCase, compiler_input
from moe_engine.kernels.triton.modules import all_cases

LIMIT = 1 << 31
ROWS, BLOCKS = 1 << 21, 1 << 9
"""Most programs of a launch's first dimension, which are rows (262,144 tokens of 8 experts), and of the others."""
STRIDE = 1 << 15
"""Largest integer argument: strides of rows."""
LOADED = 1 << 24
"""Largest integer in memory: slots of tokens."""


class Bounds(NamedTuple):
    """Of one kernel, if they are smaller; with those of its launches, `grid` and `values`: integers by argument."""

    rows: int = ROWS
    loaded: int = LOADED
    grid: tuple[int, ...] = ()
    values: dict[str, int] = {}  # noqa: RUF012 - never changed


_HEADS, _EXPERTS, _CHUNKS, _PARTS = 1 << 8, 1 << 10, 1 << 7, 1 << 13
KNOWN = {
    "expanded_kernel": Bounds(rows=_HEADS),
    "count_kernel": Bounds(rows=_CHUNKS),
    "place_kernel": Bounds(rows=_CHUNKS),
    "groups_kernel": Bounds(rows=_EXPERTS),
    "gate_up_kernel": Bounds(loaded=_EXPERTS),
    "down_kernel": Bounds(loaded=_EXPERTS),
    "merge_partials_kernel": Bounds(loaded=_PARTS),
}
ACCEPTED = {
    "tree_kernel": {  # z: KV heads; z * 128: query heads; loaded - loaded: tokens of a tree
        "(((program z * 128) + least) * lse_head_stride)", "(((program z * 128) + least) * out_head_stride)",
        "(((program z * 128) + least) * q_head_stride)", "((loaded - loaded) * 128)",
    },
    "gate_up_kernel": {"(quotient * out_scale_stride)"},  # tiles of channels
    "combine_send_kernel": {"(quotient * max_tokens)"},  # ranks
    "receive_kernel": {"(quotient * max_tokens)", "(program x * quotient)"},  # the latter: all programs' shares
    "limits_kernel": {"((program y + 1) * (quotient * 4096))"},  # parts, times the tokens of a part
    "paged_kernel": {  # partial results, of which each program has two at most, times KV heads
        f"(((loaded * program y) + program y) * {rows})" for rows in (16, 64, 128)
    },
    "draw_kernel": {"((program y + 1) * (quotient * 4096))"},
}  # fmt: skip
"""Findings whose factors have a small product."""
_VALUE = re.compile(r"%[\w#.-]+")
_ASSIGNED = re.compile(r"^\s*(%[\w.-]+)(?::\d+)? = (\S+) (.*)$")
_LOOP = re.compile(r"^\s*(?:%[\w:.-]+ = )?scf\.for (%[\w.-]+) = (\S+) to (\S+) step")
_SAME = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "arith.extsi", "arith.extui", "arith.trunci"}
_SIGNS = {"arith.muli": "*", "arith.addi": "+", "arith.subi": "-"}


class _Number(NamedTuple):
    """What is known of a value: the largest magnitude, the sums and products in it that are too large, its form."""

    most: int
    wrong: frozenset[str] = frozenset()
    form: str = "?"


def first_representation(given: dict[str, Any]) -> str:
    """Triton's text of an input of the compiler."""
    backend = make_backend(given["target"])
    options, context, stages = backend.parse_options(dict(given["options"])), ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = (backend.get_codegen_implementation(options), backend.get_module_map(), context)
    module = given["src"].make_ir(given["target"], options, *made)
    backend.add_stages(stages, options, Language.TRITON)
    return str(stages["ttir"](module, {"num_warps": options.num_warps}))


def too_large(text: str, bounds: Bounds) -> set[str]:
    """The sums and products of 32 bits in addresses of a kernel that may exceed `LIMIT`."""
    header, _, body = text.partition("attributes")
    given = ((name, bounds.values.get(name[1:], STRIDE)) for name in re.findall(r"(%\w+): i\d+", header))
    known = {name: _Number(most, form=name[1:]) for name, most in given}
    found: set[str] = set()
    for line in body.split("\n"):
        if loop := _LOOP.match(line):
            known[loop[1]] = known.get(loop[3], _Number(STRIDE))
            for name, first in re.findall(r"(%[\w.-]+) = (%[\w#.-]+)[,)]", line.partition("iter_args(")[2]):
                known[name] = known.get(first, _Number(STRIDE))
        elif assigned := _ASSIGNED.match(line):
            name, operation, rest = assigned.groups()
            rest = rest.partition(" loc(")[0]
            operands = [known.get(x, _Number(STRIDE)) for x in _VALUE.findall(rest.partition(" : ")[0])]
            known[name] = _result(operation, rest, operands, bounds)
            if operation == "tt.addptr":
                found |= operands[1].wrong
    return found


def _result(operation: str, rest: str, operands: list[_Number], bounds: Bounds) -> _Number:
    kind = rest.rpartition(" : ")[2]
    if operation == "arith.constant":
        value = re.search(r"-?\d+", rest)
        return _Number(abs(int(value[0])), form=value[0]) if value else _Number(STRIDE)
    if operation == "tt.make_range":
        return _Number(int(re.findall(r"end = (\d+)", rest)[0]), form="lane")
    if operation in ("tt.get_program_id", "tt.get_num_programs"):
        most = bounds.grid["xyz".index(rest[0])] if bounds.grid else bounds.rows if rest[0] == "x" else BLOCKS
        return _Number(most, form=f"program {rest[0]}")
    if operation == "tt.load":
        return _Number(bounds.loaded, form="loaded")
    if operation in _SAME:
        return operands[0]
    if operation in _SIGNS:
        return _combined(_SIGNS[operation], "i32" in kind, *operands)
    wrong = frozenset[str]().union(*(x.wrong for x in operands))
    if operation == "arith.divsi" and operands[1].form.isdigit():
        return _Number(operands[0].most // max(1, operands[1].most), wrong, "quotient")
    if operation in ("arith.divsi", "arith.shrsi"):
        return _Number(operands[0].most, wrong, "quotient")
    if operation in ("arith.minsi", "arith.remsi", "arith.andi"):
        return _Number(min(x.most for x in operands), wrong, "least")
    if operation in ("arith.maxsi", "arith.select"):
        return _Number(max(x.most for x in operands[-2:]), wrong, "choice")
    return _Number(STRIDE, form=operation)


def _combined(sign: str, narrow: bool, one: _Number, other: _Number) -> _Number:
    most = one.most * other.most if sign == "*" else one.most + other.most
    wrong, form = one.wrong | other.wrong, f"({one.form} {sign} {other.form})"[:100]
    if narrow and most >= LIMIT and max(one.most, other.most) < LIMIT:
        wrong |= {form}
    return _Number(most, wrong, form)


def one_of_each(cases: list[AotCase]) -> Iterator[AotCase]:
    """The largest case of each kernel. A cache with 2^31 elements or more is read by other code (WIDE)."""
    largest: dict[str, AotCase] = {}
    for case in cases:
        size = _size(case)
        if case.constants.get("WIDE", True) and size > _size(largest.get(case.kernel.__name__)):
            largest[case.kernel.__name__] = case
    return iter(largest.values())


def _size(case: AotCase | None) -> int:
    if case is None:
        return -1
    return sum(value for value in case.constants.values() if type(value) is int)


@triton.jit
def narrow_kernel(x, stride, WIDTH: tl.constexpr):
    row = tl.load(x + tl.program_id(0) * (WIDTH * 4))
    tl.store(x + (tl.program_id(0) * stride).to(tl.int64), row)


@triton.jit
def wide_kernel(x, stride, WIDTH: tl.constexpr):
    row = tl.load(x + tl.program_id(0).to(tl.int64) * (WIDTH * 4))
    tl.store(x + tl.program_id(0).to(tl.int64) * stride, row)


def examples() -> list[AotCase]:
    signature = {"x": "*bf16", "stride": "i32"}
    return [
        AotCase(kernel.__name__, kernel, signature, {"WIDTH": 7168}, 4, 3, False)
        for kernel in (narrow_kernel, wide_kernel)
    ]


def main() -> None:
    part, parts = map(int, sys.argv[1:])
    found: dict[str, Any] = {}
    for case in [*list(one_of_each(all_cases()))[part::parts], *examples()]:
        kernel = case.kernel.__name__
        text = first_representation(compiler_input(case, 90))
        numbers = too_large(text, KNOWN.get(kernel, Bounds()))
        found[kernel] = sorted(numbers - ACCEPTED.get(kernel, set()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
