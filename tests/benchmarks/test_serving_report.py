"""Percentiles, figures and the table of the serving benchmark, against numbers computed by hand."""

import numpy as np
import pytest

from moe_engine.tuning import serving_report
from moe_engine.tuning.answer import Answer
from moe_engine.tuning.stats import median, percentile, spread, std


@pytest.mark.parametrize("q", [0, 25, 50, 90, 95, 99, 100])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_percentiles_are_numpys(q, count):
    values = [(i * 37 % 101) / 7 for i in range(count)]
    assert percentile(values, q) == pytest.approx(np.percentile(values, q))
    assert std(values) == pytest.approx(np.std(values))


def test_of_nothing():
    assert percentile([], 50) == 0
    assert spread([3.0]) == 0
    assert spread([1.0, 2.0, 4.0]) == pytest.approx(1.5)


def answer(started: float, ttft: float, gaps: list[float], prompt_len: int = 10, **more) -> Answer:
    return Answer(
        prompt_len=prompt_len,
        output_len=1 + len(gaps),
        success=True,
        ttft=ttft,
        latency=ttft + sum(gaps),
        itl=gaps,
        started=started,
        **more,
    )


def two_answers() -> list[Answer]:
    return [answer(0.0, 0.1, [0.05, 0.15]), answer(0.5, 0.3, [0.1, 0.1, 0.1, 0.1], prompt_len=20)]


def test_figures():
    values = serving_report.figures(two_answers(), 2.0, goodput={"ttft": 200.0})
    assert values["completed"] == 2 and values["failed"] == 0
    assert values["total_input_tokens"] == 30 and values["total_output_tokens"] == 8
    assert values["request_throughput"] == 1.0
    assert (
        values["input_throughput"] == 15.0 and values["output_throughput"] == 4.0 and values["total_throughput"] == 19.0
    )
    assert values["mean_ttft_ms"] == pytest.approx(200) and values["median_ttft_ms"] == pytest.approx(200)
    assert values["p99_ttft_ms"] == pytest.approx(298)
    assert values["mean_tpot_ms"] == pytest.approx(100)
    assert values["max_itl_ms"] == pytest.approx(150)
    assert values["mean_e2e_latency_ms"] == pytest.approx(500)
    assert values["concurrency"] == pytest.approx(0.5)
    assert values["request_goodput"] == 0.5


def test_a_failed_request_counts_in_nothing_else():
    failed = Answer(prompt_len=1000, error="HTTP 500")
    values = serving_report.figures([*two_answers(), failed], 2.0)
    assert values["failed"] == 1 and values["completed"] == 2 and values["total_input_tokens"] == 30


def test_single_token_answers_have_no_time_per_output_token():
    values = serving_report.figures([answer(0.0, 0.2, [])], 1.0)
    assert values["mean_tpot_ms"] == 0 and values["mean_itl_ms"] == 0 and values["mean_ttft_ms"] == pytest.approx(200)


def test_peaks():
    answers = [answer(0.0, 0.1, [0.2] * 4), answer(0.5, 0.1, [0.2, 0.9])]
    # first second: 5 tokens of the first answer, 2 of the second; its last token is at 1.7 s
    assert serving_report.peak_output_throughput(answers) == 7
    assert serving_report.peak_concurrency(answers) == 2
    assert serving_report.peak_concurrency([answer(0.0, 0.1, []), answer(5.0, 0.1, [])]) == 1


def test_goodput_needs_every_limit():
    one = answer(0.0, 0.1, [0.05, 0.15])
    limits = serving_report.parse_goodput(["ttft:100", "tpot:101", "e2el:301"])
    assert serving_report.is_good(one, limits)
    assert not serving_report.is_good(one, {**limits, "e2el": 299.0})
    for wrong in ("ttft", "speed:3", "ttft:fast"):
        with pytest.raises(ValueError):
            serving_report.parse_goodput([wrong])


def test_the_table_is_that_of_bench_serving():
    values = serving_report.figures(two_answers(), 2.0, retokenized=9, goodput={"ttft": 500.0}, accept_length=1.5)
    lines = serving_report.result_table(values, backend="sglang", request_rate=float("inf"), max_concurrency=None)
    lines = lines.split("\n")
    assert lines[1] == "============ Serving Benchmark Result ============"
    assert "Backend:                                 sglang    " in lines
    assert "Traffic request rate:                    inf       " in lines
    assert "Max request concurrency:                 not set   " in lines
    assert "Successful requests:                     2         " in lines
    assert "Benchmark duration (s):                  2.00      " in lines
    assert "Total generated tokens (retokenized):    9         " in lines
    assert "Request goodput (req/s):                 1.00      " in lines
    assert "Accept length:                           1.50      " in lines
    assert "----------------End-to-End Latency----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "---------------Inter-Token Latency----------------" in lines
    for label in ("Mean E2E Latency (ms):", "P99 TTFT (ms):", "Median TPOT (ms):", "P95 ITL (ms):", "Max ITL (ms):"):
        assert any(line.startswith(label) for line in lines)
    assert lines[-1] == "=" * 50


def test_chart(tmp_path):
    file = tmp_path / "latency.png"
    serving_report.draw_chart([*two_answers(), Answer(prompt_len=1)], file, "two answers")
    assert file.read_bytes()[:4] == b"\x89PNG"


def test_median_of_even_count():
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5
