"""A sample of `fuzz_parsers`, with new texts in each run; `fuzz_parsers.py` has the command of the long run."""

from __future__ import annotations

import random

from tests.examples import examples
from tests.tokenizer.fuzz_parsers import run


def test_mutated_texts_through_every_parser() -> None:
    run(random.Random(random.getrandbits(32)), examples(1000))
