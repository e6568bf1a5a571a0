"""Backoff of admission: the events that end it, and their times."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.scheduler.admission_backoff import RETRY_DECODE_STEPS, AdmissionBackoff
from tests.examples import examples

EVENTS = ("decode", "prefill", "full", "freed", "retract", "release")


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(1, 30))))
def test_admission_stops_for_so_many_decode_steps(events: list[tuple[str, int]]) -> None:
    backoff, released, full_until, retracted_until, retracted_at = AdmissionBackoff(), 0, 0, 0, -1
    decodes = prefills = 0
    for event, count in events:
        if event == "decode":
            backoff.count_decodes(count)
            decodes, prefills = decodes + count, 0
        elif event == "prefill":
            backoff.count_plan(0, left_waiting=count % 2 == 0)
            prefills += 1
            assert backoff.is_decode_turn(prefills) and backoff.is_decode_turn(prefills + 1) is (count % 2 == 1)
        elif event == "full":
            backoff.out_of_memory()
            full_until = decodes + RETRY_DECODE_STEPS
        elif event == "freed":
            backoff.retry_now()
            full_until = 0
        elif event == "retract":
            backoff.after_retraction(count, released)
            retracted_until, retracted_at = decodes + count, released
        else:
            released += count
        stops = decodes < full_until or (decodes < retracted_until and released == retracted_at)
        assert backoff.may_admit(released) is not stops
        assert (backoff.decode_steps, backoff.prefills_in_a_row) == (decodes, prefills)
    backoff.reset()
    assert backoff.may_admit(released)
