"""The scheduler's guarantees one by one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moe_engine.errors import InputError, MoeEngineError
from moe_engine.scheduler import NEEDS_RESULT, PlanFacts, RequestEvent, Scheduler, SchedulerConfig
from moe_engine.scheduler.log_lines import decode_line, prefill_line, retract_line
from moe_engine.types import LogprobSpec, Request, SamplingParams, StepPlan, StepResult
from tests.logprobs import Entry, pack
from tests.scheduler.simulator import EOS, Simulation, expected_outputs, make_request


def scheduler(**changes: object) -> Scheduler:
    values: dict[str, object] = {"num_slots": 1000, "context_len": 500} | changes
    return Scheduler(SchedulerConfig(**values))  # type: ignore[arg-type]


def plan(s: Scheduler) -> StepPlan:
    made = s.schedule()
    assert isinstance(made, StepPlan)
    return made


def answer(s: Scheduler, made: StepPlan, token: int = 9) -> list[RequestEvent]:
    rows = [row for row, samples in zip(made.rows, made.samples) if samples]
    return s.update(StepResult(made.number, rows, [[token] for _ in rows]))


def test_plan_of_a_prompt_then_decodes() -> None:
    s = scheduler()
    s.add(make_request("a", [5, 6, 7], 3))
    first = plan(s)
    assert (first.number, first.starts, first.counts, first.samples) == (1, [0], [3], [True])
    assert first.input_ids == [5, 6, 7] and first.slots == [1, 2, 3] and first.num_decodes == 0
    assert first.new_rows[0].token_ids == [5, 6, 7] and first.new_rows[0].num_prompt == 3
    second = plan(s)  # while the first is in flight
    assert (second.starts, second.counts, second.num_decodes, second.input_ids) == ([3], [1], 1, [])
    (event,) = answer(s, first, 8)
    assert event == RequestEvent("a", [8], None, 0, 0)
    third = plan(s)
    assert third.starts == [4]
    answer(s, second)
    assert s.schedule() is None, "known to end by length in the step in flight"
    (event,) = answer(s, third)
    assert event.finish_reason is not None and event.finish_reason.to_dict() == {"type": "length", "length": 3}
    assert event.timing is not None and s.is_idle()


def test_finished_by_stop_token_wastes_one_decode_at_most() -> None:
    s = scheduler()
    s.add(make_request("a", [5, 6], 9, stop=(4,)))
    first, second = plan(s), plan(s)
    (event,) = answer(s, first, 4)
    assert event.finish_reason is not None and event.finish_reason.to_dict() == {"type": "stop", "matched": 4}
    assert s.schedule() is None and not s.is_idle()
    assert answer(s, second) == [] and s.is_idle()
    assert s.kv_cache.tree.num_evictable == 2 and s.kv_cache.slots.num_free == 998


@pytest.mark.parametrize("overlap", [False, True])
def test_the_last_token_is_not_cached(overlap: bool) -> None:
    sim = Simulation(SchedulerConfig(num_slots=100, context_len=100), overlap=overlap)
    request = make_request("a", [5, 6, 7], 40)
    sim.add(request)
    sim.run_to_end()
    known = request.prompt_ids + request.output_ids
    assert sim.scheduler.kv_cache.tree.peek(known, len(known)).length == len(known) - 1


def test_zero_new_tokens_is_prefill_only() -> None:
    sim = Simulation(SchedulerConfig(num_slots=100, context_len=100, chunked_prefill_size=4))
    sim.add(make_request("a", list(range(10)), 0))
    sim.run_to_end()
    assert sim.outcomes["a"].reason == "length" and sim.outcomes["a"].tokens == []
    assert sim.scheduler.kv_cache.tree.num_evictable == 10
    sim.check_end()


def test_ignore_eos_and_min_new_tokens() -> None:
    s = scheduler()
    s.add(make_request("ignores", [5], 3, stop=(4,), ignore_eos=True))
    s.add(make_request("waits", [6], 9, min_new=2))
    for token in (EOS, 4):
        made = plan(s)
        assert [e.finish_reason for e in answer(s, made, token)] == [None, None]
    events = answer(s, plan(s), EOS)
    assert [e.finish_reason.type for e in events if e.finish_reason] == ["length", "stop"]


def test_an_impossible_token_aborts_its_request_only() -> None:
    s = scheduler(vocab_size=50)
    s.add(make_request("a", [5], 9))
    s.add(make_request("b", [6], 9))
    made = plan(s)
    bad, good = s.update(StepResult(made.number, made.rows, [[50], [49]]))
    assert bad.finish_reason is not None and bad.finish_reason.status_code == 500 and bad.token_ids == []
    assert good.finish_reason is None
    (nan,) = answer(s, plan(s), -1)
    assert nan.finish_reason is not None and "NaN" in (nan.finish_reason.message or "")
    assert s.is_idle()


def test_several_tokens_a_step_end_at_the_first_that_ends() -> None:
    s = scheduler()
    s.add(make_request("a", [5], 9))
    made = plan(s)
    (event,) = s.update(StepResult(made.number, made.rows, [[EOS, 8, 8]]))
    assert event.token_ids == [EOS] and event.finish_reason is not None
    s.add(make_request("b", [5], 9))
    made = plan(s)
    with pytest.raises(MoeEngineError, match="more than its plan has slots for"):
        s.update(StepResult(made.number, made.rows, [[8, 8, 8]]))


def test_results_must_come_in_order() -> None:
    s = scheduler()
    s.add(make_request("a", [5], 9))
    first, second = plan(s), plan(s)
    with pytest.raises(MoeEngineError, match="oldest step in flight is 1"):
        answer(s, second)
    with pytest.raises(MoeEngineError, match="rows"):
        s.update(StepResult(first.number, [], []))


def test_a_request_that_never_fits_is_refused_with_numbers_and_flag() -> None:
    s = scheduler(num_slots=64, page_size=16, context_len=100)
    with pytest.raises(InputError, match=r"need 80 KV slots.*only 64.*--mem-fraction-static"):
        s.add(make_request("a", [1] * 50, 20))
    with pytest.raises(InputError, match=r"110 tokens, longer than the model's context length \(100 tokens\)"):
        s.add(make_request("b", [1] * 50, 60))
    with pytest.raises(InputError, match="empty"):
        s.add(make_request("c", [], 60))
    s.add(make_request("d", [1] * 50, 14))
    with pytest.raises(InputError, match="already in use"):
        s.add(make_request("d", [1], 1))
    open_end = Request("e", [1] * 50, SamplingParams(max_new_tokens=None), max_new_tokens=50)
    s.add(open_end)
    assert open_end.max_new_tokens == 14


def test_abort_waiting_at_once_running_at_the_next_update() -> None:
    s = scheduler(max_rows=1)
    for rid in ("x1", "x2", "y"):
        s.add(make_request(rid, [5, 6], 9))
    first = plan(s)
    assert s.abort(["x", "unknown"]) == []  # no id is a prefix of another
    (event,) = s.abort(["x1", "x2", "x2"])
    assert event.rid == "x2" and event.finish_reason is not None and event.finish_reason.type == "abort"
    (event,) = answer(s, first)
    assert event.rid == "x1" and event.token_ids == [] and event.finish_reason is not None
    assert s.abort([]) == []
    assert [e.rid for e in s.abort_all()] == ["y"]
    assert s.is_idle()


def test_clients_that_leave_together_cost_no_further_step() -> None:
    """Neither their waiting requests nor their running ones; the next request starts in the next plan."""
    s = scheduler(max_rows=3, chunked_prefill_size=8)
    for number in range(20):
        s.add(make_request(str(number), [number + 5] * 20, 9))
    first = plan(s)
    s.add(make_request("stays", [3, 4], 2))
    ended = [event.rid for event in s.abort(map(str, range(20)))]
    assert s.schedule() is NEEDS_RESULT
    ended += [event.rid for event in answer(s, first)]
    assert sorted(ended, key=int) == [str(number) for number in range(20)]
    second = plan(s)
    assert [new.token_ids for new in second.new_rows] == [[3, 4]] and second.num_tokens == 2
    assert s.totals.prompt_tokens == 20 + 2  # of two requests


def test_a_client_that_leaves_does_not_delay_the_steps_of_others() -> None:
    s = scheduler()
    for rid in "abc":
        s.add(make_request(rid, [5, 6], 9))
    first = plan(s)
    assert s.abort(["a"]) == []
    second = plan(s)  # while the first is in flight
    assert [event.rid for event in answer(s, first)] == ["b", "c", "a"]
    answer(s, second)
    assert len(plan(s).rows) == 2


def test_abort_with_nothing_in_flight_is_immediate_even_mid_chunk() -> None:
    sim = Simulation(SchedulerConfig(num_slots=100, context_len=100, chunked_prefill_size=8), overlap=False)
    sim.add(make_request("a", list(range(40)), 4))
    sim.turn()
    sim.abort("a")
    assert sim.outcomes["a"].reason == "abort" and sim.scheduler.is_idle()
    assert sim.scheduler.kv_cache.tree.num_evictable == 8
    sim.check_end()


def test_duplicates_are_adopted_from_the_tree() -> None:
    sim = Simulation(SchedulerConfig(num_slots=100, context_len=100))
    sim.keep_plans = True
    sim.add(make_request("a", [5] * 20, 3, eos=False))
    sim.add(make_request("b", [5] * 20 + [6], 3, eos=False))
    sim.turn()
    sim.turn()
    (write,) = sim.plans[1].row_writes
    assert (write.row, write.start, len(write.slots)) == (sim.plans[0].rows[1], 0, 20)
    assert write.slots == sim.plans[0].slots[:20]
    sim.run_to_end()
    sim.check_end()


def test_no_row_write_goes_to_a_row_that_ended_meanwhile() -> None:
    s = scheduler()
    s.add(make_request("a", [5] * 20, 9))
    s.add(make_request("b", [5] * 20, 1))
    first = plan(s)
    s.prefills.cache_prefills()  # as in a call of schedule() without a plan
    assert len(s.table.row_writes) == 1
    answer(s, first)
    second = plan(s)
    assert second.row_writes == [] and second.finished_rows == [first.rows[1]]


def test_cached_tokens_and_prompt_logprob_limit() -> None:
    s = scheduler()
    s.add(make_request("a", [5] * 20, 1))
    answer(s, plan(s))
    s.add(make_request("b", [5] * 20, 1))
    made = plan(s)
    assert made.starts == [19] and made.new_rows[0].slots == list(range(1, 20))
    assert s.last_facts is not None and (s.last_facts.cached_token, s.last_facts.new_token) == (19, 1)
    (event,) = answer(s, made)
    assert event.cached_tokens == 19 and s.stats().cache_hit_rate == 0.95
    wants = make_request("c", [5] * 20, 1)
    wants.logprobs = LogprobSpec(start=8)
    s.add(wants)
    made = plan(s)
    assert made.starts == [7], "the logits at 7 give the log-probability of token 8"
    of_prompt, of_token = pack([Entry(5, -1.0)] * 12), pack([Entry(9, -2.0)])
    (event,) = s.update(StepResult(made.number, made.rows, [[9]], [of_token], {made.rows[0]: of_prompt}))
    assert event.prompt_logprobs == of_prompt and event.logprobs == of_token


def test_running_requests_get_a_turn_between_many_prompts() -> None:
    s = scheduler(chunked_prefill_size=8, max_consecutive_prefills=3)
    s.add(make_request("a", [5], 20, eos=False))
    answer(s, plan(s))
    s.add(make_request("long", [6] * 80, 1))
    kinds = []
    for _ in range(9):
        made = plan(s)
        kinds.append(made.num_decodes)
        answer(s, made)
    assert kinds == [1, 0, 0, 0, 1, 0, 0, 0, 1]


def test_prompts_are_short_while_many_requests_decode() -> None:
    cadence = {"max_consecutive_prefills": 1, "max_delayed_tokens": 36, "least_chunk": 8}
    s = scheduler(num_slots=400, chunked_prefill_size=64, **cadence)
    for i in range(3):
        s.add(make_request(f"first{i}", [i + 5] * 20, 50, eos=False))
    counts = []
    for number in range(9):
        if number == 1:
            for i in range(4):
                s.add(make_request(f"later{i}", [i + 10] * 8, 1))
        made = plan(s)
        counts.append((made.num_decodes, made.counts[made.num_decodes :]))
        answer(s, made)
    assert counts == [
        (0, [20, 20, 20]), (3, []), (0, [8, 4]), (3, []), (0, [4, 8]), (3, []), (0, [8]), (3, []), (3, []),
    ], "36 / 3 tokens, then a decode step; the first step delayed no request"  # fmt: skip
    own = s.table.settings
    for limit, chunk in ((1, 8), (72, 24), (1000, 64), (None, 64)):
        own.set({"max_delayed_tokens": limit})
        assert own.chunk_beside(3) == chunk and own.chunk_beside(0) == 64


def test_running_requests_get_a_turn_between_prompts_that_arrive_one_by_one() -> None:
    s = scheduler(chunked_prefill_size=64)
    kinds = []
    for i in range(4):
        for name in "ab"[: 1 + i % 2]:
            s.add(make_request(f"{name}{i}", [5 + i] * 4, 20, eos=False))
        made = plan(s)
        kinds.append((made.num_decodes, len(made.rows)))
        answer(s, made)
    assert kinds == [(0, 1), (1, 1), (0, 3), (4, 4)], "those that arrive meanwhile are prefilled together"


def test_mixed_chunk() -> None:
    s = scheduler(chunked_prefill_size=8, enable_mixed_chunk=True)
    s.add(make_request("a", [5], 20, eos=False))
    answer(s, plan(s))
    s.add(make_request("long", [6] * 80, 1))
    made = plan(s)
    assert (made.num_decodes, made.counts, made.samples) == (1, [1, 7], [True, False])
    assert len(made.input_ids) == 7 and len(made.slots) == 8


def test_short_memory_in_flight_asks_to_drain() -> None:
    s = scheduler(num_slots=24, init_new_token_ratio=0.0)
    for i in range(2):
        s.add(make_request(str(i), [i + 5] * 4, 11, stop=(4,)))
    made = plan(s)
    for _ in range(20):
        following = s.schedule()
        if following is NEEDS_RESULT:
            break
        answer(s, made)
        assert isinstance(following, StepPlan)
        made = following
    else:
        raise AssertionError("never short")
    assert s.stats().num_retractions_total == 0
    answer(s, made)
    assert isinstance(s.schedule(), StepPlan)
    assert s.stats().num_retractions_total == 1 and s.stats().num_retracted == 1


def test_flush_only_when_idle() -> None:
    s = scheduler()
    s.add(make_request("a", [5] * 20, 1))
    assert not s.flush_cache()
    made = plan(s)
    assert not s.flush_cache()
    answer(s, made)
    assert s.kv_cache.tree.num_evictable == 20 and s.flush_cache()
    assert s.kv_cache.tree.num_evictable == 0 and s.kv_cache.slots.num_free == 1000


def test_empty_plan_keeps_numbers_in_step() -> None:
    s = scheduler()
    empty = s.empty_plan()
    assert (empty.number, empty.rows) == (1, [])
    assert not s.is_idle() and s.update(StepResult(1, [], [])) == [] and s.is_idle()
    s.add(make_request("a", [5], 1))
    assert plan(s).number == 2


def test_a_leak_is_repaired_not_raised() -> None:
    s = scheduler()
    s.kv_cache.slots.pages.take(7)
    s.kv_cache.rows.take(1)
    findings = s.check_integrity()
    assert len(findings) == 2 and "7 of 1000 were lost" in findings[0]
    assert s.kv_cache.slots.num_free == 1000 and s.check_integrity() == []
    s.kv_cache.slots.pages.take(3)
    s.add(make_request("a", [5], 1))
    answer(s, plan(s))  # idle again: counts disagree, so the integrity check runs
    assert s.kv_cache.slots.num_free + s.kv_cache.tree.num_evictable == 1000


def test_ratio_decays_and_is_reset_when_idle() -> None:
    s = scheduler()
    s.add(make_request("a", [5], 9, eos=False))
    start = s.ratio.value
    assert start == 0.7
    for _ in range(5):
        answer(s, plan(s))
    assert s.ratio.value == pytest.approx(0.7 - 4 * (0.7 - 0.098) / 600)
    while (made := s.schedule()) is not None:
        assert isinstance(made, StepPlan)
        answer(s, made)
    assert s.ratio.value == start


def test_admission_reserves_room_for_running_requests() -> None:
    s = scheduler(num_slots=100, context_len=100)
    s.add(make_request("a", [5] * 10, 60))
    s.add(make_request("b", [6] * 10, 60))
    assert len(plan(s).rows) == 1, "b is expected to need more than is left"
    s = scheduler(num_slots=100, context_len=100)
    s.add(make_request("a", [5] * 10, 40))
    s.add(make_request("b", [6] * 10, 35))
    assert len(plan(s).rows) == 2


def test_log_lines() -> None:
    facts = PlanFacts(
        number=3,
        new_seq=2,
        new_token=8192,
        cached_token=5,
        num_decodes=233,
        num_running=7,
        num_queued=317,
        num_used=370959,
        token_usage=0.8153,
    )
    assert decode_line(facts, 4594.0123, cuda_graph=True) == (
        "Decode batch. #running-req: 233, #token: 370959, token usage: 0.82, cuda graph: True, "
        "gen throughput (token/s): 4594.01, #queue-req: 317, "
    )
    assert "token usage: 0.82, accept len: 1.50, cuda graph: False" in decode_line(facts, 1.0, accept_len=1.5)
    assert prefill_line(facts) == (
        "Prefill batch. #new-seq: 2, #new-token: 8192, #cached-token: 5, token usage: 0.82, "
        "#running-req: 7, #queue-req: 317, "
    )
    assert retract_line(3, 0.5, 0.71239) == (
        "KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_token_ratio: 0.5000 -> 0.7124"
    )


def test_stats() -> None:
    s = scheduler(max_rows=1)
    s.add(make_request("a", [5] * 20, 9))
    s.add(make_request("b", [6] * 30, 9))
    made = plan(s)
    stats = s.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_used, stats.token_usage, stats.prompt_tokens_total) == (20, 0.02, 20)
    assert stats.oldest_wait_seconds >= 0
    answer(s, made)
    assert s.stats().generation_tokens_total == 1


def test_the_fake_model_has_both_finish_reasons() -> None:
    reasons = {expected_outputs(make_request(str(i), [i], 40))[1] for i in range(20)}
    assert reasons == {"stop", "length"}


def test_no_torch_no_numpy() -> None:
    code = "import sys, moe_engine.scheduler; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_batches_count_whole_pages() -> None:
    s = scheduler(num_slots=1000, page_size=4, max_prefill_tokens=20)
    for i in range(4):
        s.add(make_request(str(i), [i] * 5, 1))
    assert plan(s).counts == [5, 5], "three would be 24 tokens in pages"


def test_a_prefix_that_is_in_use_is_not_room() -> None:
    s = scheduler(num_slots=100, context_len=100)
    s.add(make_request("old", [5] * 60, 1))
    answer(s, plan(s))
    s.add(make_request("a", [6] * 20, 10, ignore_eos=True))
    answer(s, plan(s))
    s.add(make_request("b", [5] * 70, 9, ignore_eos=True))  # 10 new and 9 more, but 60 of the 80 free are its prefix
    made = plan(s)
    assert made.num_decodes == 1 and made.new_rows == []
    assert s.kv_cache.tree.num_protected == 20 and s.check_integrity() == []


@pytest.mark.parametrize("same_namespace", [True, False])
def test_only_a_prompt_of_its_own_namespace_is_worth_a_wait(same_namespace: bool) -> None:
    """A prefix of a request with another `extra_key` can never be shared."""
    s = scheduler()
    for rid, extra_key in ("a", "tenant"), ("b", "tenant" if same_namespace else None):
        s.add(make_request(rid, [5] * 60, 4, extra_key=extra_key))
    assert [new.rid for new in plan(s).new_rows] == (["a"] if same_namespace else ["a", "b"])


def test_after_a_retraction_prompt_logprobs_are_not_asked_again() -> None:
    s = scheduler(num_slots=24, init_new_token_ratio=0.0, policy="lof")
    for i in range(2):
        request = make_request(str(i), [i + 5] * 4, 11, stop=(4,))
        request.logprobs = LogprobSpec(start=0, top=2)
        s.add(request)
    specs: list[LogprobSpec | None] = []
    late = False
    while (made := s.schedule()) is not None:
        assert isinstance(made, StepPlan)
        specs += [new.logprobs for new in made.new_rows if new.rid != "late"]
        if s.stats().num_retracted and not late:
            late = True
            s.add(make_request("late", [9] * 4, 20, stop=(4,)))
            assert [e.request.rid for e in s.table.queue.entries][1:] == ["late"], "the retracted request goes first"
        answer(s, made)
    assert late and specs == [LogprobSpec(0, 2), LogprobSpec(0, 2), LogprobSpec(None, 2)]
