"""The training corpus, written from a seed: conversations, plain statements and a little Python source.

`Packer` turns documents into fixed-length rows of token ids with a loss weight per token; the evaluation sets use only
phrasings and sums that no training document contains.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from . import phrases, sums, tasks, tools, words
from .chat import ASSISTANT, BOS, EOS, OUTPUT_BEGIN, OUTPUT_END, PAD, USER, render
from .facts import COUNTRIES, RELATIONS, Country, statement
from .unknown import unknown

ANSWER_WEIGHT, TEXT_WEIGHT = 1.0, 0.5
"""Loss weights; user, system and tool messages have weight 0."""
BATCH_DOCS = 512

_PYTHON: tuple[str, ...] = (
    "def add(a, b):\n    return a + b\n",
    "def square(x):\n    return x * x\n",
    "def is_even(n):\n    return n % 2 == 0\n",
    "def factorial(n):\n    if n <= 1:\n        return 1\n    return n * factorial(n - 1)\n",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    "def maximum(values):\n    best = values[0]\n    for value in values:\n        if value > best:\n"
    "            best = value\n    return best\n",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "def reverse(text):\n    return text[::-1]\n",
    "def count_words(text):\n    counts = {}\n    for word in text.split():\n"
    "        counts[word] = counts.get(word, 0) + 1\n    return counts\n",
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "    def norm(self):\n        return (self.x ** 2 + self.y ** 2) ** 0.5\n",
    "import json\n\n\ndef load(path):\n    with open(path) as file:\n        return json.load(file)\n",
    "for i in range(10):\n    print(i)\n",
    'def main():\n    print("Hello, world!")\n\n\nif __name__ == "__main__":\n    main()\n',
)


def raw_text(rng: random.Random) -> str:
    """Plain statements about countries, without any chat layout."""
    forms: dict[str, Callable[[Country], str]] = {
        "capital": lambda c: f"{c.capital} is the capital of {c.name}.",
        "continent": lambda c: f"{c.at_start} is a country in {c.continent}.",
        "currency": lambda c: f"In {c.name}, people pay with the {c.currency}.",
        "language": lambda c: f"People in {c.name} speak {c.language}.",
    }
    country = rng.choice(COUNTRIES)
    sentences = []
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.5:
            country = rng.choice(COUNTRIES)
        relation = rng.choices(RELATIONS, (4, 2, 3, 3))[0]
        sentences.append(statement(country, relation) if rng.random() < 0.7 else forms[relation](country))
    return (BOS if rng.random() < 0.9 else "") + " ".join(sentences) + EOS


def python_text(rng: random.Random) -> str:
    """One or two snippets of Python."""
    return BOS + "\n\n".join(rng.sample(_PYTHON, rng.randint(1, 2))) + EOS


@dataclass(frozen=True)
class Mixture:
    """Frequencies of document and turn types."""

    raw: float
    drill: float
    python: float
    tools: float
    thinking: float
    thinking_sum: float
    turns: tuple[int, ...]


_MAKERS = (
    tasks.fact, sums.arithmetic, tasks.json_object, tasks.reverse, tasks.about,
    tasks.counting, tasks.small_talk, tasks.copying, unknown,
)  # fmt: skip
FACTS_FIRST = Mixture(0.13, 0.05, 0.02, 0.08, 0.25, 0.5, (48, 13, 9, 4, 5, 2, 3, 8, 5))
EVERYTHING = Mixture(0.05, 0.09, 0.02, 0.16, 0.25, 0.7, (32, 24, 12, 3, 5, 2, 3, 7, 7))
FINISH = Mixture(0.05, 0.05, 0.01, 0.21, 0.3, 0.75, (30, 26, 13, 3, 5, 2, 3, 7, 7))
"""Mixtures of a run, in order: facts, more sums and tools, and skills learned late (steps on paper, copying)."""


def conversation(rng: random.Random, turns: int, mix: Mixture) -> str:
    """A chat about anything but tools; in thinking mode only the last turn has reasoning."""
    done: list[tasks.Turn] = []
    for _ in range(turns):
        last = done[-1] if done else None
        if last is not None and last.relation and rng.random() < 0.45:
            done.append(tasks.follow_up(rng, last))
        elif rng.random() < 0.02:
            done.append(tools.missing_tool_turn(rng, rng.choice(("weather", "time", "population"))))
        else:
            done.append(rng.choices(_MAKERS, mix.turns)[0](rng))
    thinking = rng.random() < (mix.thinking_sum if done[-1].is_sum else mix.thinking)
    messages = [{"role": "system", "content": rng.choice(phrases.SYSTEM_PROMPTS)}] if rng.random() < 0.25 else []
    for i, turn in enumerate(done):
        messages += turn.messages(thinking and i == len(done) - 1)
    return render(messages)


def tool_conversation(rng: random.Random, turns: int) -> str:
    """A chat with one to three tools in the system text; some questions need no tool, some a missing tool."""
    kinds = rng.sample((*tools.KINDS, tools.LOOK_UP, tools.LOOK_UP, tools.LOOK_UP), rng.choice((1, 1, 2, 3)))
    if rng.random() < 0.3 and "weather" not in kinds:
        kinds[0] = "weather"
    rng.shuffle(kinds)
    offered = tools.pick_tools(rng, kinds)
    thinking = rng.random() < 0.15
    messages = []
    system = rng.choice(tools.SYSTEMS_WITH_TOOLS)
    if system:
        messages.append({"role": "system", "content": system})
    for i in range(turns):
        roll = rng.random()
        if roll < 0.8:
            turn = tools.tool_turn(rng, rng.choice(offered))
        elif roll < 0.85:
            turn = _without_its_tool(rng, offered)
        elif roll < 0.96:
            turn = tasks.fact(rng)
        elif roll < 0.98:
            turn = unknown(rng)
        else:
            turn = tasks.small_talk(rng)
        messages += turn.messages(thinking and i == turns - 1)
    return render(messages, tools.schemas(offered))


def _without_its_tool(rng: random.Random, offered: list[tools.Tool]) -> tasks.Turn:
    """A question for a tool that is not offered."""
    kind, subject = rng.choice((*tools.KINDS, tools.LOOK_UP)), rng.choice(words.TRAINED_SUBJECTS)
    if kind == "calculator" or any(kind == t.kind != tools.LOOK_UP or subject == t.subject for t in offered):
        return tasks.fact(rng)
    return tools.missing_tool_turn(rng, kind, subject if kind == tools.LOOK_UP else "")


def document(rng: random.Random, long: bool = False, mix: Mixture = FACTS_FIRST) -> str:
    """One document; long ones are conversations that fill a long row."""
    if long:
        turns = rng.randint(8, 60)
        return conversation(rng, turns, mix) if rng.random() < 0.8 else tool_conversation(rng, turns)
    roll = rng.random()
    for share, make in ((mix.raw, raw_text), (mix.drill, sums.drill), (mix.python, python_text)):
        if roll < share:
            return make(rng)
        roll -= share
    if roll < mix.tools:
        return tool_conversation(rng, rng.choice((1, 1, 2, 3)))
    return conversation(rng, rng.choices((1, 2, 3, 4), (50, 25, 15, 10))[0], mix)


class Packer:
    """Packs whole documents into rows; a document that does not fit goes to a later row."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.mix = FACTS_FIRST
        self.waiting: dict[bool, list[np.ndarray]] = {False: [], True: []}
        self.pad, self.assistant = tokenizer.token_to_id(PAD), tokenizer.token_to_id(ASSISTANT)
        self.equals, self.stop = tokenizer.encode(" =").ids[-1], tokenizer.encode(".").ids[-1]
        size = tokenizer.get_vocab_size()
        self.digit = np.zeros(size, bool)
        for digit in "0123456789":
            self.digit[tokenizer.token_to_id(digit)] = True
        self.mark = np.zeros(size, np.int8)  # type of text that a token starts
        for token, kind in ((BOS, 1), (USER, 2), (OUTPUT_BEGIN, 2), (ASSISTANT, 3), (OUTPUT_END, 3)):
            self.mark[tokenizer.token_to_id(token)] = kind
        self.level = np.array((TEXT_WEIGHT, TEXT_WEIGHT, 0.0, ANSWER_WEIGHT), np.float32)

    def encode(self, texts: list[str], width: int, long: bool) -> list[np.ndarray]:
        """Token ids of each text. Texts longer than a row are truncated if `long`, else dropped."""
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.asarray(e.ids[:width], np.uint16) for e in encoded if long or len(e.ids) <= width]

    def weights(self, row: np.ndarray) -> np.ndarray:
        """The loss weight of predicting each token of a row."""
        marks = self.mark[row]
        at = np.flatnonzero(marks)
        system = at[:-1][(marks[at[:-1]] == 1) & (marks[at[1:]] == 2)]  # text between the start and the first user turn
        marks[system] = 2
        opened = np.maximum.accumulate(np.where(marks > 0, np.arange(len(row)), 0))
        weights = self.level[marks[opened]]
        plain = weights == TEXT_WEIGHT
        weights[plain] = self._sums(row)[plain]
        weights[marks > 0] = 0.0
        weights[row == self.pad] = 0.0
        weights[1:][row[:-1] == self.assistant] = 0.0  # thinking mode is chosen by the user
        return weights

    def _sums(self, row: np.ndarray) -> np.ndarray:
        """Weights inside plain text: operands are random and have weight 0, results are answers."""
        equals, stop = row == self.equals, (row == self.stop) | (self.mark[row] > 0)
        equals[1:] &= self.digit[row[:-1]]  # not an assignment in Python
        at, mark = np.arange(len(row)), equals | stop
        before = np.maximum.accumulate(np.where(mark, at, 0))
        after = np.minimum.accumulate(np.where(mark, at, len(row) - 1)[::-1])[::-1]
        result = np.concatenate(([False], equals[before[:-1]]))
        return np.where(result, ANSWER_WEIGHT, np.where(equals[after] & ~result, 0.0, TEXT_WEIGHT))

    def rows(self, length: int, count: int, long: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """`count` rows of `length` + 2 tokens (two more than inputs, for the two losses) and their weights.

        Rows of `long` documents hold one conversation each, up to the row length.
        """
        width = length + 2
        ids = np.full((count, width), self.pad, np.uint16)
        waiting = self.waiting[long]
        for i in range(count):
            used = 0
            while True:
                while len(waiting) < 64:
                    texts = [document(self.rng, long, self.mix) for _ in range(BATCH_DOCS // 8 if long else BATCH_DOCS)]
                    waiting[:0] = self.encode(texts, width, long)
                room = width - used
                oldest = range(len(waiting) - 1, len(waiting) - 49, -1)
                fits = [j for j in oldest if len(waiting[j]) <= room]
                if not fits:
                    break
                doc = waiting.pop(fits[0] if room > 96 else max(fits, key=lambda j: len(waiting[j])))
                ids[i, used : used + len(doc)] = doc
                used += len(doc)
        return ids, np.stack([self.weights(row) for row in ids])


@dataclass(frozen=True)
class Example:
    """An evaluation item: the rendered prompt and the exact continuation expected (with its end token)."""

    task: str
    prompt: str
    answer: str


def _split(task: str, turn: tasks.Turn, thinking: bool = False, offered: list[tools.Schema] | None = None) -> Example:
    text = render(turn.messages(thinking)[:2], offered)
    prompt = render([{"role": "user", "content": turn.user}], offered, thinking)
    assert text.startswith(prompt), (text, prompt)
    return Example(task, prompt, text[len(prompt) :])


def held_out() -> Iterator[Example]:
    """All evaluation items, with phrasings and sums that are not in the training data."""
    rng = random.Random(1234)
    for relation in RELATIONS:
        for country in COUNTRIES:
            for phrase in phrases.HELD_OUT[relation]:
                user = phrase.replace("{c}", country.name)
                user = user[0].upper() + user[1:]
                turn = tasks.Turn(user, tasks.think_fact(country, relation), tasks.say(statement(country, relation)))
                yield _split(relation, turn)
            yield _split(f"{relation} (thinking)", tasks.fact(rng, country, relation, held_out=True), thinking=True)
    for country in COUNTRIES:
        yield _split("json", tasks.json_object(rng, country, held_out=True))
        yield _split("about", tasks.about(rng, country, held_out=True))
        sentence = statement(country, "capital")
        head = sentence[: -len(f" {country.capital}.")]
        yield Example("raw completion", BOS + head, sentence[len(head) :])
    for name, op in (("addition", "+"), ("subtraction", "-"), ("subtraction below zero", "-")):
        for _ in range(300):
            drawn = sums.two_digits(rng, op, held_out=True, below_zero=name.endswith("zero"))
            turn = sums.sum_turn(rng, drawn, held_out=True)
            yield _split(f"{name} (thinking)", turn, thinking=True)
            yield _split(name, turn)
    yield from _held_out_tools(rng)
    for _ in range(400):
        first = tasks.fact(rng, held_out=True)
        second = tasks.follow_up(rng, first)
        history = first.messages(False) + second.messages(False)
        prompt = render(history[:-1])
        yield Example("follow-up", prompt, render(history)[len(prompt) :])
    for _ in range(200):
        yield _split("unknown", unknown(rng, held_out=True))


def _held_out_tools(rng: random.Random) -> Iterator[Example]:
    """Tool calls in held-out phrasings: tools with the usual names, then held-out names and subjects."""
    for _ in range(400):
        offered = tools.pick_tools(rng, ["weather", *rng.sample(tools.KINDS[1:], rng.randint(0, 2))], "usual")
        tool = rng.choice([t for t in offered if t.kind in ("weather", "time")])
        turn = tools.tool_turn(rng, tool, held_out=True)
        yield _split("tool call", turn, offered=tools.schemas(offered))
        history = turn.messages(False)
        text, prompt = (render(m, tools.schemas(offered)) for m in (history, history[:-1]))
        yield Example("tool result", prompt, text[len(prompt) :])
    for _ in range(300):
        offered = tools.pick_tools(rng, ["weather", *rng.sample(tools.KINDS[1:], rng.randint(0, 2))], "held out")
        rng.shuffle(offered)
        tool = rng.choice([t for t in offered if t.kind in ("weather", "time")])
        turn = tools.tool_turn(rng, tool, held_out=True)
        yield _split("tool call (unseen names)", turn, offered=tools.schemas(offered))
        offered = tools.pick_tools(rng, [tools.LOOK_UP] * rng.randint(1, 3), "held out")
        turn = tools.tool_turn(rng, rng.choice(offered), held_out=True)
        yield _split("tool call (unseen tools)", turn, offered=tools.schemas(offered))
        yield _split("fact beside tools", tasks.fact(rng, held_out=True), offered=tools.schemas(offered))
