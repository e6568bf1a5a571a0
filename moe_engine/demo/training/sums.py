"""Sums: held-out pairs of operands, the steps on paper, chat turns, and dense tables.

A pair is held out by its unit digits, so the training data never have the units of a held-out pair of two-digit numbers
together: the model must learn them from smaller numbers (one-digit tables, and two digits with one) and combine the
columns itself.
"""

from __future__ import annotations

import random

from .chat import BOS, EOS
from .tasks import Turn, ask, say

Sum = tuple[int, str, int]
"""Left operand, operator (+, - or *), right operand."""
_WORDS = {"+": " plus ", "-": " minus ", "*": " times "}


def is_held_out_sum(a: int, b: int) -> bool:
    """Pairs of two-digit operands kept for evaluation: one in ten (differences have the larger number as `a`)."""
    return (a * 131 + b * 17) % 10 == 3


def result_of(a: int, op: str, b: int) -> int:
    """The value of a sum."""
    return a + b if op == "+" else a - b if op == "-" else a * b


def steps(a: int, op: str, b: int) -> str:
    """Column by column, as in school; for negative results the operands are swapped first.

    The operands are written down before their columns: each digit is then a few tokens away, whatever the phrasing of
    the question.
    """
    if op == "*":
        return f"I know that {a} * {b} = {a * b}."
    if op == "-" and a < b:
        return f"{a} is less than {b}. {b} - {a}: {_columns(b, op, a)} So {a - b}."
    return f"{a} {op} {b}: {_columns(a, op, b)} So {result_of(a, op, b)}."


def _columns(a: int, op: str, b: int) -> str:
    """The units, then the tens, with carry or borrow."""
    (ta, ua), (tb, ub) = divmod(a, 10), divmod(b, 10)
    if op == "+":
        units = ua + ub
        carry = " + 1" if units > 9 else ""
        tail = f", write {units - 10}, carry 1" if carry else ""
        return f"{ua} + {ub} = {units}{tail}. {ta} + {tb}{carry} = {ta + tb + (units > 9)}."
    if ua >= ub:
        return f"{ua} - {ub} = {ua - ub}. {ta} - {tb} = {ta - tb}."
    return f"{ua + 10} - {ub} = {ua + 10 - ub}, borrow 1. {ta} - {tb} - 1 = {ta - tb - 1}."


def two_digits(rng: random.Random, op: str, held_out: bool = False, below_zero: bool = False) -> Sum:
    """A sum or difference of two-digit numbers, from the held-out pairs or from the others."""
    while True:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if op == "-" and a < b:
            a, b = b, a
        if is_held_out_sum(a, b) == held_out and (a > b or not below_zero):
            return (b, op, a) if below_zero else (a, op, b)


def two_and_one(rng: random.Random, op: str) -> Sum:
    """A two-digit number and a one-digit number."""
    a, b = rng.randint(10, 99), rng.randint(0, 9)
    return (b, op, a) if op == "+" and rng.random() < 0.4 else (a, op, b)


def one_digit(rng: random.Random, op: str) -> Sum:
    """An entry of the addition table, or of the subtraction table that undoes it."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    return (a, op, b) if op == "+" else (a + b, op, b)


def draw_sum(rng: random.Random) -> Sum:
    """A sum for training questions: mostly two digits, products of one digit."""
    op = rng.choice("++---*")
    if op == "*":
        return rng.randint(2, 9), op, rng.randint(2, 9)
    roll = rng.random()
    if roll < 0.06:
        return one_digit(rng, op)
    if roll < 0.12:
        return two_and_one(rng, op)
    return two_digits(rng, op, below_zero=op == "-" and roll > 0.75)


def sum_turn(rng: random.Random, drawn: Sum, held_out: bool = False) -> Turn:
    """The question with this sum, and its answer."""
    a, op, b = drawn
    style = 0.0 if held_out else rng.random()
    shown = f"{a} {op} {b}" if style < 0.7 else f"{a}{op}{b}" if style < 0.8 else f"{a}{_WORDS[op]}{b}"
    answer = f"{a} {op} {b} = {result_of(a, op, b)}."
    return Turn(ask(rng, "arithmetic", shown, held_out), steps(a, op, b), say(answer), is_sum=True)


def arithmetic(rng: random.Random) -> Turn:
    """A sum, difference or small product."""
    return sum_turn(rng, draw_sum(rng))


def drill(rng: random.Random) -> str:
    """A table of sums as plain text: denser than any conversation."""
    lines = []
    for _ in range(rng.randint(12, 28)):
        op, roll = rng.choice("+--"), rng.random()
        if roll < 0.2:
            a, op, b = one_digit(rng, op)
        elif roll < 0.45:
            a, op, b = two_and_one(rng, op)
        else:
            a, op, b = two_digits(rng, op, below_zero=op == "-" and roll > 0.92)
        lines.append(f"{a} {op} {b} = {result_of(a, op, b)}.")
    return BOS + " ".join(lines) + EOS
