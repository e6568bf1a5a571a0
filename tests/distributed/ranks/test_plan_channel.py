"""Plans between ranks: complete, in order, never lost without an error, never too far ahead."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from moe_engine.core.executor import RankLost
from moe_engine.core.rank_calls import RankAnswer
from moe_engine.errors import EngineDeadError, StepError, StepNotRun
from moe_engine.executor.leader_worker import MAX_AHEAD, LeaderWorker
from moe_engine.executor.plan_broadcast import Masks, PlanReceiver, PlanSender, Run, Step, Stop
from moe_engine.executor.progress import Progress
from moe_engine.parallel.collectives import PeerLost
from moe_engine.types import LogprobSpec, NewRow, RowWrite, SamplingParams, Speculation, StepPlan, StepResult
from moe_engine.types.token_masks import DraftTree, LaunchedStep, StepMasks
from tests.waiting import until

SECONDS = 60.0
"""Time limit, far above the real durations."""


def random_plan(rng: random.Random, number: int) -> StepPlan:
    count = rng.randint(0, 40)
    integers = lambda n: [rng.randrange(1 << rng.choice((5, 20, 40))) for _ in range(n)]  # noqa: E731
    sampling = SamplingParams(
        temperature=rng.random(), logit_bias=((3, rng.random()),), stop=("é",), sampling_seed=rng.getrandbits(63)
    )
    new = NewRow(7, "r", integers(5), 5, integers(2), sampling, rng.getrandbits(63), frozenset(integers(2)))
    logprobs = LogprobSpec(0, 2, (1, 2))
    other = NewRow(8, "s", integers(3), 2, [], SamplingParams(), 1, frozenset(), logprobs, max_length=9)
    return StepPlan(
        number,
        rows=integers(count),
        starts=integers(count),
        counts=integers(count),
        samples=[rng.random() < 0.5 for _ in range(count)],
        slots=integers(count),
        num_decodes=count // 2,
        input_ids=integers(count),
        new_rows=[new, other][: rng.randint(0, 2)],
        row_writes=[RowWrite(1, 2, integers(3))],
        finished_rows=integers(3),
        speculation=Speculation(2, True, [RowWrite(4, 0, integers(2))]) if rng.random() < 0.5 else None,
    )


@pytest.fixture
def sender(tmp_path: Path) -> PlanSender:
    return PlanSender(f"ipc://{tmp_path}/plans")


def test_plans_arrive_whole_and_in_order_at_every_follower(sender: PlanSender) -> None:
    rng = random.Random(2)
    plans = [random_plan(rng, 10 + 3 * i) for i in range(300)]
    names = ["rank1", "rank2", "rank3"]
    receivers = [PlanReceiver(sender.address, name) for name in names]
    assert not sender.wait_subscribed([*names, "rank4"], 0.2)
    assert sender.wait_subscribed(names, SECONDS)
    for plan in plans:
        sender.send(plan)
    sender.stop()
    for receiver in receivers:  # no receiver reads before all plans are sent
        for expected in plans:
            message = receiver.receive(SECONDS)
            assert isinstance(message, Step) and message.plan == expected
        assert isinstance(receiver.receive(SECONDS), Stop)
        assert receiver.receive(0.01) is None


def test_lost_plan_is_detected(sender: PlanSender) -> None:
    receiver = PlanReceiver(sender.address, "rank1")
    assert sender.wait_subscribed(["rank1"], SECONDS)
    sender.send(StepPlan(1))
    assert receiver.receive(SECONDS) is not None
    sender.sequence += 1  # a message lost by a broken connection
    sender.send(StepPlan(3))
    with pytest.raises(EngineDeadError, match=r"plan was lost .* received step 3 of the channel, expected 2"):
        receiver.receive(SECONDS)


class Detector:
    """A detector of followers that the test advances."""

    def __init__(self) -> None:
        self.failure: RankLost | None = None
        self.done = 0
        self.failures: list[tuple[int, str, bool]] = []

    def slowest_steps_done(self) -> int:
        return self.done

    def failed(self, rank: int, message: str, *, peer_lost: bool) -> None:
        self.failures.append((rank, message, peer_lost))

    def stepped(self, seconds: float) -> None: ...

    def on_failure(self, listener: object) -> None:
        self.listener = listener

    def lose(self) -> None:
        self.failure = RankLost("TP1 is lost")
        self.listener(self.failure)  # type: ignore[operator]


class LocalWorker:
    """Records plans; returns results at once, or never."""

    def __init__(self, answers: bool = True) -> None:
        self.answers = answers
        self.plans: list[int] = []
        self.launched: LaunchedStep | None = None

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        self.plans.append(plan.number)
        future: Future[StepResult] = Future()
        if self.answers:
            future.set_result(StepResult(plan.number, [], []))
        return future

    def launch(self, plan: StepPlan, *, reports_drafts: bool = True) -> LaunchedStep:
        launched = self.launched = LaunchedStep(plan.number, reports_drafts=reports_drafts)
        return launched

    def sample(self, masks: StepMasks) -> None:
        self.launched.sample(masks)

    def abandon(self) -> None:
        if self.launched is not None:
            self.launched.abandon()

    def run_call(self, method: str, args: Mapping[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(f"{method} behind {self.plans}")
        return future

    def close(self) -> None: ...


def test_late_masks_follow_their_plan(sender: PlanSender) -> None:
    receiver, local = PlanReceiver(sender.address, "rank1"), LocalWorker()
    assert sender.wait_subscribed(["rank1"], SECONDS)
    worker = LeaderWorker(local, sender, Detector(), Progress())
    masks = StepMasks(4, [2], [1], bytes(40))
    launched = worker.launch(StepPlan(4, rows=[2], masked=[2]))
    local.launched.report({2: DraftTree([7, -1])})
    assert launched.drafts.result(SECONDS) == {2: DraftTree([7, -1])}
    worker.sample(masks)
    assert local.launched.masks.result(SECONDS) is masks
    step, sent = receiver.receive(SECONDS), receiver.receive(SECONDS)
    assert isinstance(step, Step) and step.plan.masked == [2]
    assert isinstance(sent, Masks) and sent.masks == masks
    worker.execute(StepPlan(5))
    assert isinstance(receiver.receive(SECONDS), Step)


def test_lost_masks_are_noticed(sender: PlanSender) -> None:
    receiver = PlanReceiver(sender.address, "rank1")
    assert sender.wait_subscribed(["rank1"], SECONDS)
    sender.send(StepPlan(1, rows=[2], masked=[2]))
    sender.send(StepPlan(2))
    assert isinstance(receiver.receive(SECONDS), Step)
    with pytest.raises(EngineDeadError, match="a plan was lost"):
        receiver.receive(SECONDS)


def test_a_lost_rank_ends_a_step_that_waits_for_masks(sender: PlanSender) -> None:
    detector, local = Detector(), LocalWorker()
    worker = LeaderWorker(local, sender, detector, Progress())
    launched = worker.launch(StepPlan(1, rows=[2], masked=[2]))
    detector.lose()
    assert isinstance(launched.result.exception(SECONDS), RankLost)
    assert isinstance(local.launched.masks.exception(SECONDS), StepNotRun)
    assert launched.drafts.result(SECONDS) == {}


def test_calls_run_between_the_same_steps_on_every_rank(sender: PlanSender) -> None:
    receivers = {rank: PlanReceiver(sender.address, f"rank{rank}") for rank in (1, 2)}
    assert sender.wait_subscribed(["rank1", "rank2"], SECONDS)
    local = LocalWorker()
    leader = LeaderWorker(local, sender, Detector(), Progress(), followers=(1, 2))
    leader.execute(StepPlan(1))
    call = leader.call_ranks("view", {"a": 1}, 30.0)
    leader.execute(StepPlan(2))
    for rank, receiver in receivers.items():
        kinds = [receiver.receive(SECONDS) for _ in range(3)]
        assert [type(message) for message in kinds] == [Step, Run, Step]
        assert isinstance(kinds[1], Run) and (kinds[1].method, kinds[1].args) == ("view", {"a": 1})
        assert call.answers() is None
        receiver.answer(kinds[1].id, RankAnswer(rank, f"of {rank}"))
        receiver.answer(kinds[1].id, RankAnswer(rank, "a second answer"))
        receiver.answer(99, RankAnswer(rank, "of an unknown call"))
    found = until(call.answers)
    assert found == [RankAnswer(0, "view behind [1]"), RankAnswer(1, "of 1"), RankAnswer(2, "of 2")]


def test_a_rank_without_an_answer_is_named_at_the_deadline(sender: PlanSender) -> None:
    receiver = PlanReceiver(sender.address, "rank1")
    assert sender.wait_subscribed(["rank1"], SECONDS)
    leader = LeaderWorker(LocalWorker(), sender, Detector(), Progress(), followers=(1, 2))
    call = leader.call_ranks("view", {}, 600.5)
    run = receiver.receive(SECONDS)
    assert isinstance(run, Run)
    receiver.answer(run.id, RankAnswer(1, error="no memory"))
    until(lambda: call.answers() is None and len(call._answers) == 2)
    call._deadline = time.monotonic()
    late = RankAnswer(2, error="no answer within 600.5 s")
    assert call.answers() == [RankAnswer(0, "view behind []"), RankAnswer(1, error="no memory"), late]


def test_the_leader_waits_for_its_slowest_follower(sender: PlanSender) -> None:
    detector, local = Detector(), LocalWorker()
    worker = LeaderWorker(local, sender, detector, Progress())
    thread = threading.Thread(target=lambda: [worker.execute(StepPlan(i)) for i in range(MAX_AHEAD + 10)])
    thread.start()
    for allowed in (MAX_AHEAD, MAX_AHEAD + 4):
        deadline = time.monotonic() + 60
        while len(local.plans) < allowed and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert local.plans == list(range(allowed))
        detector.done += 4
    detector.done = MAX_AHEAD
    thread.join(SECONDS)
    assert local.plans == list(range(MAX_AHEAD + 10))


def test_failure_ends_hanging_steps(sender: PlanSender) -> None:
    detector, local = Detector(), LocalWorker(answers=False)
    worker = LeaderWorker(local, sender, detector, Progress())
    hanging = worker.execute(StepPlan(1))
    worker.check()
    detector.lose()
    with pytest.raises(RankLost, match="TP1 is lost"):
        hanging.result(0)
    with pytest.raises(RankLost):
        worker.execute(StepPlan(2)).result(0)
    with pytest.raises(RankLost):
        worker.check()
    assert local.plans == [1]


def test_failed_step_waits_for_the_detector(sender: PlanSender) -> None:
    """The next planned step waits too. It was not run, so it is not a failure of this rank."""
    detector, local, steps = Detector(), LocalWorker(), [Future[StepResult](), Future[StepResult]()]
    local.execute = lambda plan: steps[plan.number - 5]  # type: ignore[method-assign]
    worker = LeaderWorker(local, sender, detector, Progress())
    futures = [worker.execute(StepPlan(5)), worker.execute(StepPlan(6))]
    try:
        raise StepError("step 5") from PeerLost("all_gather failed")
    except StepError as error:
        steps[0].set_exception(error)
    steps[1].set_exception(StepNotRun("step 6"))
    assert detector.failures == [(0, "step 5", True), (0, "step 6", True)]
    assert not any(future.done() for future in futures)
    detector.lose()
    for future in futures:
        with pytest.raises(RankLost):
            future.result(0)
