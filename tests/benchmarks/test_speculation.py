"""The speculation benchmark: counted drafts, compared figures, and a whole small run."""

import json
import random

import pytest

from benchmarks import speculation
from benchmarks.agreeing_checkpoint import ensure_agreeing_checkpoint
from benchmarks.mtp_agreement import measure
from benchmarks.speculation import OFF, Run, drafting_flags, figures, verdicts
from benchmarks.speculation_subjects import drafts_by_token, taken


def run(seconds, tokens, steps=0, proposed=(), accepted=()):
    return Run(seconds, [list(range(tokens))], steps, proposed, accepted)


@pytest.mark.parametrize("seed", range(5))
def test_chains_are_taken_as_an_engine_takes_them(seed):
    """Against a simple loop over a list of correct and wrong drafts."""
    rng = random.Random(seed)
    depth, answer = rng.randint(1, 4), [rng.randrange(50) for _ in range(60)]
    right = [[rng.random() < 0.7 for _ in range(depth)] for _ in answer]
    ahead = [[*answer, *[-9] * depth][p + 1 : p + 1 + depth] for p in range(len(answer))]
    chains = [[t if good else 99 for t, good in zip(a, r)] for a, r in zip(ahead, right)]
    steps, known = [], 1
    while known < len(answer):
        judged = min(depth, len(answer) - known)
        hits = [right[known - 1][: i + 1].count(False) == 0 for i in range(judged)]
        steps.append(hits)
        known += sum(hits) + 1
    wanted = []
    for i in range(depth):
        column = [hits[i] for hits in steps if len(hits) > i]
        wanted += [sum(column) / len(column)] if column else []
    assert taken(depth, [answer], [chains]) == pytest.approx(wanted)


def test_the_drafts_of_an_agreeing_checkpoint_are_known_from_its_matrices(tmp_path):
    path = ensure_agreeing_checkpoint(0.7, "moe-tiny", tmp_path / "m", seed=5, num_hidden_layers=2)
    tokens = list(range(6, 2048))
    drafted, following = (
        drafts_by_token(path, tokens),
        drafts_by_token(
            ensure_agreeing_checkpoint(1.0, "moe-tiny", tmp_path / "right", seed=5, num_hidden_layers=2), tokens
        ),
    )  # the same seed: the same cycle, no spoiled token
    share = sum(drafted[t] == following[t] for t in tokens) / len(tokens)
    assert share == pytest.approx(0.7, abs=0.01)
    assert measure(path, 1, 16, num_tokens=40).rates[0] == pytest.approx(share, abs=0.1)


def test_ratios_are_those_within_a_round():
    """A machine of half the speed has the same ratios."""
    sides = {
        OFF: [run(1.0, 100), run(2.0, 100), run(1.0, 100)],
        "auto": [
            run(0.5, 100, 40, (40, 30), (30, 20)),
            run(1.0, 100, 0, (0, 0), (0, 0)),
            run(0.5, 100, 10, (10, 10), (10, 10)),
        ],
    }
    auto = figures({1: sides})[1]["auto"]
    assert auto["ratio"] == 2.0 and auto["ratio_spread"] == 0.0
    assert auto["accept_length"] == pytest.approx(1 + 70 / 50)
    assert (auto["proposed"], auto["accepted"]) == ([50, 40], [40, 30])
    assert auto["drafts_per_step"] == pytest.approx(90 / 50)
    assert figures({1: sides})[1][OFF]["accept_length"] is None


def test_answers_that_differ_show():
    other = Run(1.0, [[1, 2], [3]])
    sides = {OFF: [Run(1.0, [[1, 2], [4]])], "1": [other]}
    assert figures({1: sides})[1]["1"]["same_answers"] == 0.5


def test_verdicts():
    def values(one, many):
        return {1: {"auto": {"ratio": one}, "3": {"ratio": 0.5}}, 32: {"auto": {"ratio": many}}}

    near, far = {"3": ([0.80, 0.61], [0.81, 0.62])}, {"3": ([0.80, 0.58], [0.81, 0.62])}
    assert list(verdicts(values(1.7, 0.99), near, gains=True).values()) == [True, True, True]
    assert list(verdicts(values(1.5, 0.97), far, gains=True).values()) == [False, False, False]
    assert list(verdicts(values(0.99, 0.99), near, gains=False).values()) == [True, True]
    assert verdicts({8: {"1": {"ratio": 0.5}}}, {}, gains=True) == {}


def test_flags_of_each_way_of_drafting():
    assert drafting_flags(OFF, {"speculative_algorithm": "NGRAM"}) == {"speculative_algorithm": None}
    assert drafting_flags("auto", {}) == {"speculative_algorithm": "NEXTN", "speculative_num_steps": "auto"}
    three = drafting_flags("3", {"speculative_algorithm": "NGRAM"})
    assert three["speculative_algorithm"] == "NGRAM" and three["speculative_num_draft_tokens"] == 4


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.drawn(1, group="runs of benchmarks")
def test_a_whole_run_on_the_embedded_model(tmp_path, capsys):
    file = tmp_path / "result.json"
    options = ["--models", "embedded", "--questions", "1", "--depths", "3", "--concurrency", "6", "--rounds", "1"]
    assert speculation.main([*options, "--busy", "--json", str(file), "--dtype", "float32"]) == 0
    result = json.loads(file.read_text())["models"]["embedded"]
    mine, offline = result["acceptance"]["3"]["engine"], result["acceptance"]["3"]["offline"]
    assert len(mine) == 3 and mine == pytest.approx(offline, abs=0.03)
    side = result["concurrency"]["6"]["3"]
    assert side["same_answers"] == 1.0 and side["accept_length"] > 2.5
    printed = capsys.readouterr().out
    assert "accept len" in printed and "pass   acceptance is within 2% of offline" in printed
