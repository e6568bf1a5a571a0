"""Mutated outputs through every tool-call and reasoning parser: no exception, no lost text, any split gives the same.

``python -m tests.tokenizer.fuzz_parsers --texts 100000 [--seed N]`` is the long run; `test_parser_fuzz.py` samples it.
Every text is parsed whole, character by character, and in random pieces.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moe_engine.tokenizer.reasoning import REASONING_FORMATS, reasoning_parser
from moe_engine.tokenizer.tool_calls import TOOL_FORMATS, ToolCallParser, ToolDelta
from tests.tokenizer.test_tool_call_formats import FUNCTIONS, GOOD, NO_CALLS, PIECES

OUTPUTS = [(form, text) for form, text, *_ in GOOD] + NO_CALLS
ODD = ["\\", '"', "'", "{", "}", "[", "]", "<", ">", "|", "｜", "▁", "\n", " ", "\x00", "é", "😀", "​", "e+9", "-"]
BEFORE = "Kept words. "


def mutated(rng: random.Random, text: str) -> str:
    """1 to 4 edits: removed, doubled, moved and inserted pieces."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(text))
        end = min(len(text), at + rng.choice((1, 1, 2, 5, 20)))
        piece = text[at:end]
        kind = rng.randrange(6)
        if kind == 0:
            text = text[:at] + text[end:]
        elif kind == 1:
            text = text[:end] + piece + text[end:]
        elif kind == 2:
            rest = text[:at] + text[end:]
            to = rng.randint(0, len(rest))
            text = rest[:to] + piece + rest[to:]
        elif kind == 3:
            text = text[:at] + rng.choice(ODD) + text[at:]
        elif kind == 4:
            text = text[:at] + rng.choice(PIECES) + text[at:]
        else:
            text = text[:at]
    return text


def splits(rng: random.Random, text: str) -> Iterator[list[str]]:
    yield [text]
    yield list(text)
    pieces, at = [], 0
    while at < len(text):
        size = rng.choice((1, 2, 3, 7, 30))
        pieces.append(text[at : at + size])
        at += size
    yield pieces


def squashed(text: str) -> str:
    return "".join(text.split())


MARKERS = ("<|python_start|>", "<|python_end|>", *TOOL_FORMATS["kimi_k2"].markers, "<|tool_calls|>", "<|calls|>")
"""Special tokens around all calls; a parser may drop them without a call."""


def without_markers(text: str) -> str:
    while any(marker in text for marker in MARKERS):  # the removal of one marker may join the halves of another
        for marker in MARKERS:
            text = text.replace(marker, "")
    return text


Calls = list[tuple[str, str]]


def parse_calls(form: str, pieces: list[str], functions: Mapping[str, Any] | None = FUNCTIONS) -> tuple[str, Calls]:
    """Plain text; name and arguments of each call."""
    parser = ToolCallParser(form, functions)
    parts = [part for piece in pieces for part in parser.parts(piece)] + parser.last_parts()
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for part in parts:
        if isinstance(part, ToolDelta):
            names[part.index] = names.get(part.index, "") + (part.name or "")
            arguments[part.index] = arguments.get(part.index, "") + part.arguments
    assert set(names) == set(range(len(names))), "numbers of calls have gaps"
    return "".join(part for part in parts if isinstance(part, str)), [(names[i], arguments[i]) for i in sorted(names)]


def check_calls(rng: random.Random, form: str, text: str) -> None:
    text = BEFORE + text
    found = [parse_calls(form, pieces) for pieces in splits(rng, text)]
    assert found[0] == found[1] == found[2], ("depends on the pieces", form, text, found)
    shown, calls = found[0]
    assert squashed(shown).startswith(squashed(BEFORE)), ("lost text before a call", form, text, shown)
    free, all_calls = parse_calls(form, [text], None)
    if not all_calls:  # every function is available: other text is content
        assert without_markers(free) == without_markers(text), ("lost text outside calls", form, text, free)
    assert all(name in FUNCTIONS for name, _ in calls), ("a call of an unknown function", form, text, calls)


def check_reasoning(rng: random.Random, name: str, text: str) -> None:
    form = REASONING_FORMATS[name]
    for inside in (False, True):
        found = []
        for pieces in splits(rng, text):
            parser = reasoning_parser(form, inside=inside)
            parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
            found.append(("".join(r for r, _ in parts), "".join(c for _, c in parts)))
        assert found[0] == found[1] == found[2], ("depends on the pieces", name, inside, text, found)
        if form.harmony:  # headers are not content
            continue
        if form.xtml:  # reasoning may follow content
            left = re.sub(r"<\|(open|close)\|>(think|response)<\|sep\|>|<\|close\|>message<\|sep\|>", "", text)
            assert sorted("".join(found[0])) == sorted(left), ("lost text", name, inside, text, found[0])
            continue
        shown = squashed("".join(found[0]))
        if form.keeps:  # the start tag may come from the prompt
            added = "".join(found[0]).startswith(form.start) and not text.lstrip().startswith(form.start)
            shown = shown.removeprefix(squashed(form.start)) if added else shown
        texts = kept(text, form.start, form.end)
        for tag in filter(None, (*(form.answer or ()), form.turn)):
            texts |= {text[:at] + text[at + len(tag) :] for text in texts for at in places(text, tag)}
        assert shown in texts, ("lost text", name, inside, text, found[0])


def places(text: str, tag: str) -> list[int]:
    return [at for at in range(len(text)) if text.startswith(tag, at)]


def kept(text: str, start: str, end: str) -> set[str]:
    """The text without some leading start tags, and each of these without its first end tag; without white space."""
    found = [text]
    while text.lstrip().startswith(start):
        text = text.lstrip()[len(start) :]
        found.append(text)
    return {squashed(one) for text in found for one in (text, text.replace(end, "", 1))}


def tool_case(rng: random.Random) -> Callable[[], None]:
    form, text = rng.choice(OUTPUTS)
    if rng.random() < 0.1:  # an output of another format
        form = rng.choice(sorted(TOOL_FORMATS))
    text = mutated(rng, text)
    return lambda: check_calls(rng, form, text)


def reasoning_case(rng: random.Random) -> Callable[[], None]:
    name = rng.choice(sorted(REASONING_FORMATS))
    form = REASONING_FORMATS[name]
    words = [*form.markers, form.start, form.end, form.calls, "a b", "\n\n", "x</", "<thi", " "]
    text = mutated(rng, "".join(rng.choices(words, k=rng.randint(1, 6))))
    return lambda: check_reasoning(rng, name, text)


def run(rng: random.Random, texts: int) -> None:
    """Raises AssertionError with the parser and the text."""
    for i in range(texts):
        (reasoning_case if i % 5 == 0 else tool_case)(rng)()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.getrandbits(32) if options.seed is None else options.seed
    rng, faults = random.Random(seed), 0
    for i in range(options.texts):
        try:
            run(rng, 1) if i % 5 == 0 else tool_case(rng)()
        except Exception as error:
            faults += 1
            if faults <= 20:
                print(f"{type(error).__name__}: {error}"[:1500], flush=True)
    print(f"{options.texts} texts, {faults} faults, --seed {seed}")
    raise SystemExit(faults > 0)


if __name__ == "__main__":
    main()
