"""The training text of the embedded model: correct sums, valid calls, no evaluation questions, full rows."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from tokenizers import Tokenizer

from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.demo.training import corpus, phrases, sums, tools, unknown, words
from moe_engine.demo.training.chat import ASSISTANT, BOS, EOS, OUTPUT_END, USER
from moe_engine.demo.training.train import Recipe

MIXTURES = (corpus.FACTS_FIRST, corpus.EVERYTHING, corpus.FINISH)
SUM = re.compile(r"(?<!\d)(\d+) ([-+*]) (\d+)(?: - 1)?(?: \+ 1)? = (-?\d+)")


@pytest.fixture(scope="module")
def training_text() -> str:
    rng = random.Random(random.randrange(2**32))
    return "\n".join(corpus.document(rng, False, mix) for mix in MIXTURES for _ in range(1500))


def packer() -> corpus.Packer:
    return corpus.Packer(Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json")), random.randrange(2**32))


def test_no_held_out_sum_is_trained(training_text: str) -> None:
    seen = re.findall(r"(?<!\d)(\d\d) ?([-+]|plus|minus) ?(\d\d)(?!\d)", training_text)
    assert len(seen) > 1000
    for left, op, right in seen:
        a, b = int(left), int(right)
        if op in "-minus" and a < b:
            a, b = b, a
        assert not sums.is_held_out_sum(a, b), (left, op, right)


def test_no_held_out_word_is_trained(training_text: str) -> None:
    used = set(re.findall(r"[a-z]+", training_text.lower()))
    assert used & set(words.TRAINED_SUBJECTS) and used & set(words.TRAINED_ARGUMENTS)
    assert not used & {*words.HELD_OUT_SUBJECTS, *words.HELD_OUT_ARGUMENTS, *words.HELD_OUT_VERBS} - {"who"}
    assert '"who"' not in training_text
    for question in (q for kind in phrases.HELD_OUT.values() for q in kind):
        start = question.split("{c}")[0]
        assert len(start) < 12 or start not in training_text, question


def test_held_out_questions_differ_from_trained_ones() -> None:
    rng = random.Random(random.randrange(2**32))
    trained = {unknown.unknown(rng).user for _ in range(5000)}
    assert not trained & {unknown.unknown(rng, held_out=True).user for _ in range(500)}
    trained_words = {words.invented(rng) for _ in range(5000)}
    assert not trained_words & {words.invented(rng, held_out=True) for _ in range(2000)}


def test_every_written_sum_is_right(training_text: str) -> None:
    found = list(SUM.finditer(training_text))
    assert len(found) > 2000
    for match in found:
        said, value = match.group(0).split(" = ")
        assert eval(said) == int(value), match.group(0)


@pytest.mark.parametrize("held_out", [False, True])
def test_reasoning_ends_in_the_result(held_out: bool) -> None:
    rng = random.Random(random.randrange(2**32))
    for op, below_zero in (("+", False), ("-", False), ("-", True)):
        for _ in range(200):
            a, _, b = sums.two_digits(rng, op, held_out, below_zero)
            turn = sums.sum_turn(rng, (a, op, b), held_out)
            assert turn.reasoning.endswith(f"So {a + b if op == '+' else a - b}.")
            assert (a - b < 0) == below_zero or op == "+"


@pytest.mark.parametrize("names", ["usual", "trained", "held out"])
def test_calls_fit_their_schemas(names: tools.Names) -> None:
    rng = random.Random(random.randrange(2**32))
    types = {"string": str, "integer": int}
    for _ in range(150):
        kinds = [*rng.sample(tools.KINDS, 2)] + [tools.LOOK_UP] * (names != "usual")
        offered = tools.pick_tools(rng, kinds, names)
        by_name = {tool.name: tool.schema["function"]["parameters"] for tool in offered}
        assert len(by_name) == len(kinds)
        for tool in offered:
            turn = tools.tool_turn(rng, tool, held_out=names == "held out")
            for call in turn.replies[0]["tool_calls"]:
                schema, arguments = by_name[call["function"]["name"]], json.loads(call["function"]["arguments"])
                assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])
                for name, value in arguments.items():
                    assert isinstance(value, types[schema["properties"][name]["type"]])
                    assert str(value) in turn.user


@pytest.mark.parametrize("mix", MIXTURES)
def test_rows_are_full_and_hold_whole_documents(mix: corpus.Mixture) -> None:
    """Before, documents too long for a row filled the queue: a fifth of each row was empty, and long tool calls never
    occurred."""
    pack = packer()
    pack.mix = mix
    bos, eos, pad = (pack.tokenizer.token_to_id(t) for t in (BOS, EOS, "<｜▁pad▁｜>"))
    filled = []
    for _ in range(40):
        ids, weights = pack.rows(512, 4)
        filled.append((ids != pad).mean())
        assert weights.shape == ids.shape and not weights[ids == pad].any()
        for row in ids:
            text = row[row != pad]
            assert text[-1] == eos
            starts = np.flatnonzero(text == bos)
            assert (text[starts[starts > 0] - 1] == eos).all()
    assert np.mean(filled) > 0.97


def test_loss_falls_on_what_the_model_says() -> None:
    pack = packer()
    rng = random.Random(random.randrange(2**32))
    for _ in range(100):
        text = corpus.tool_conversation(rng, 2)
        (ids,) = pack.encode([text], 4096, False)
        said = pack.tokenizer.decode(ids[pack.weights(ids) > 0].tolist(), skip_special_tokens=False)
        turns = re.findall(f"(?:{ASSISTANT}(?:</think>|<think>)|{OUTPUT_END}(?!<｜tool▁output▁begin))(.*?{EOS})", text)
        assert said == "".join(turns) and USER not in said


def test_a_table_of_sums_is_weighed_by_its_results() -> None:
    pack = packer()
    text = sums.drill(random.Random(random.randrange(2**32)))
    (ids,) = pack.encode([text], 4096, False)
    weights = pack.weights(ids)
    said = pack.tokenizer.decode(ids[weights == corpus.ANSWER_WEIGHT].tolist())
    assert said == "".join(re.findall(r" =( -?\d+\.)", text))
    assert not weights[(weights != corpus.ANSWER_WEIGHT) & (ids != pack.tokenizer.token_to_id(EOS))].any()


def test_the_parts_of_a_run() -> None:
    recipe = Recipe(steps=3750)
    mixtures = [recipe.mixture(step) for step in range(recipe.steps)]
    assert [m for m, after in zip(mixtures, [*mixtures[1:], None]) if m is not after] == [*MIXTURES]
    rates = np.array([recipe.learning_rate(step) for step in range(recipe.steps)]) / recipe.lr
    assert rates.max() == 1.0 and rates.min() == pytest.approx(0.01)
    assert np.abs(np.diff(rates)).max() <= 0.0101, "the rate jumps"
    assert (np.diff(rates[recipe.warmup :]) <= 0).all() and rates[-1] == rates.min(), "it falls once, until the end"
