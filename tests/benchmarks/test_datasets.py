"""Shapes of the request sets."""

import argparse
import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from moe_engine.tuning import datasets
from moe_engine.tuning.datasets import Vocabulary

WORDS = {word: i + 10 for i, word in enumerate("abcdefgh")}


def vocabulary() -> Vocabulary:
    names = {i: word for word, i in WORDS.items()}
    return Vocabulary(
        encode=lambda text: [WORDS.get(word, 9) for word in text.split()],
        decode=lambda ids: " ".join(names.get(i, "?") for i in ids),
        plain_ids=list(range(10, 500)),
    )


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    datasets.add_dataset_arguments(parser)
    return parser.parse_args(argv)


def test_defaults_are_bench_servings():
    args = parse()
    assert (args.dataset_name, args.num_prompts, args.seed) == ("sharegpt", 1000, 42)
    assert (args.random_input_len, args.random_output_len, args.random_range_ratio) == (1024, 1024, 0.0)
    assert (args.gsp_num_groups, args.gsp_prompts_per_group, args.gsp_system_prompt_len) == (64, 16, 2048)
    assert (args.gsp_question_len, args.gsp_output_len) == (128, 256)


@pytest.mark.parametrize("name", ["random", "random-ids"])
def test_random_lengths(name):
    args = parse("--dataset-name", name, "--num-prompts", "300", "--random-input-len", "40", "--random-output-len", "8",
                 "--random-range-ratio", "0.5")  # fmt: skip
    requests = datasets.make_dataset(args, vocabulary())
    assert len(requests) == 300
    assert {len(r.prompt) for r in requests} == set(range(20, 41)) == {r.prompt_len for r in requests}
    assert {r.output_len for r in requests} == set(range(4, 9))
    assert all(10 <= token < 500 for r in requests for token in r.prompt)
    assert datasets.make_dataset(args, vocabulary()) == requests  # the seed determines all values


def test_full_ratio_gives_exact_lengths_and_zero_at_least_one_token():
    exact = list(datasets.random_requests(20, 16, 4, 1.0, vocabulary(), random.Random(0)))
    assert {(r.prompt_len, r.output_len) for r in exact} == {(16, 4)}
    skipped = list(datasets.random_requests(20, 16, 4, 0.5, vocabulary(), random.Random(3), skip=12))
    whole = list(datasets.random_requests(20, 16, 4, 0.5, vocabulary(), random.Random(3)))
    assert skipped[12:] == whole[12:] and not any(request.prompt for request in skipped[:12])
    assert [(one.prompt_len, one.output_len) for one in skipped] == [(one.prompt_len, one.output_len) for one in whole]
    heads = list(datasets.random_requests(20, 16, 4, 0.5, vocabulary(), random.Random(3), head=9))
    assert heads == [replace(request, prompt=request.prompt[:9]) for request in whole]
    loose = list(datasets.random_requests(200, 3, 2, 0.0, vocabulary(), random.Random(0)))
    assert {r.prompt_len for r in loose} == {1, 2, 3}
    with pytest.raises(ValueError, match="random-range-ratio"):
        next(datasets.random_requests(1, 3, 2, 1.5, vocabulary(), random.Random(0)))


def test_shared_prefixes():
    requests = datasets.generated_shared_prefix(3, 5, 20, 4, 7, vocabulary(), random.Random(1))
    assert len(requests) == 15 and {r.prompt_len for r in requests} == {24} and {r.output_len for r in requests} == {7}
    prefixes = Counter(tuple(r.prompt[:20]) for r in requests)
    assert sorted(prefixes.values()) == [5, 5, 5]
    assert len({tuple(r.prompt) for r in requests}) == 15


def sharegpt_file(tmp_path):
    turns = [("a b c", "d e"), ("a", "b c"), ("a b", "c d e f"), ("a b c d e f g h", "a b c"), ("lonely", None)]
    entries = [
        {"conversations": [{"from": "human", "value": q}] + ([{"from": "gpt", "value": a}] if a else [])}
        for q, a in turns
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(entries))
    return str(path)


def test_sharegpt_takes_first_turns_and_drops_the_too_short(tmp_path):
    requests = datasets.sharegpt(sharegpt_file(tmp_path), 10, vocabulary(), random.Random(0))
    assert sorted((r.prompt, r.prompt_len, r.output_len) for r in requests) == [
        ("a b", 2, 4), ("a b c", 3, 2), ("a b c d e f g h", 8, 3)
    ]  # fmt: skip


def test_sharegpt_limits(tmp_path):
    path = sharegpt_file(tmp_path)
    short = datasets.sharegpt(path, 10, vocabulary(), random.Random(0), context_len=6)
    assert sorted(r.prompt for r in short) == ["a b", "a b c"]
    fixed = datasets.sharegpt(path, 2, vocabulary(), random.Random(0), output_len=9)
    assert len(fixed) == 2 and {r.output_len for r in fixed} == {9}
    chat = datasets.sharegpt(path, 1, vocabulary(), random.Random(0), chat=lambda text: f"a {text} b")
    assert chat[0].prompt.startswith("a ") and chat[0].prompt_len >= 4
    with pytest.raises(ValueError, match="--dataset-path"):
        datasets.sharegpt("", 1, vocabulary(), random.Random(0))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot be read"), ("{", "not JSON"), ('{"a": 1}', "not a ShareGPT file"), ("3", "not a ShareGPT file"),
        ('[{"conversations": [{"value": "a"}, {}]}]', "not a ShareGPT file"),
    ],
)  # fmt: skip
def test_another_file_is_refused_with_its_flag(tmp_path, text, complaint):
    path = tmp_path / "questions.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"--dataset-path .*questions.json: {complaint}.*give a"):
        datasets.sharegpt(str(path), 1, vocabulary(), random.Random(0))


def test_random_text_is_repeated_and_cut_to_length(tmp_path):
    path = sharegpt_file(tmp_path)
    requests = list(datasets.random_requests(8, 12, 3, 1.0, vocabulary(), random.Random(0), text_source=path))
    assert all(len(r.prompt) == 12 and set(r.prompt) <= set(WORDS.values()) for r in requests)
