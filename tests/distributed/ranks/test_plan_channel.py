"""Plans between ranks: whole, in order, never lost in silence, never too far ahead."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from moe_engine.core.executor import RankLost
from moe_engine.errors import EngineDeadError, StepError, StepNotRun
from moe_engine.executor.leader_worker import MAX_AHEAD, LeaderWorker
from moe_engine.executor.plan_broadcast import PlanReceiver, PlanSender, Step, Stop
from moe_engine.executor.progress import Progress
from moe_engine.parallel.collectives import PeerLost
from moe_engine.types import LogprobSpec, NewRow, RowWrite, SamplingParams, Speculation, StepPlan, StepResult


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
    assert sender.wait_subscribed(names, 5.0)
    for plan in plans:
        sender.send(plan)
    sender.stop()
    for receiver in receivers:  # no one reads before everything is sent
        for expected in plans:
            message = receiver.receive(5.0)
            assert isinstance(message, Step) and message.plan == expected
        assert isinstance(receiver.receive(5.0), Stop)
        assert receiver.receive(0.01) is None


def test_lost_plan_is_detected(sender: PlanSender) -> None:
    receiver = PlanReceiver(sender.address, "rank1")
    assert sender.wait_subscribed(["rank1"], 5.0)
    sender.send(StepPlan(1))
    assert receiver.receive(5.0) is not None
    sender.sequence += 1  # one that a broken connection swallowed
    sender.send(StepPlan(3))
    with pytest.raises(EngineDeadError, match=r"plan was lost .* received step 3 of the channel, expected 2"):
        receiver.receive(5.0)


class Detector:
    """Followers that the test advances."""

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
    """Records plans; answers at once, or never."""

    def __init__(self, answers: bool = True) -> None:
        self.answers = answers
        self.plans: list[int] = []

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        self.plans.append(plan.number)
        future: Future[StepResult] = Future()
        if self.answers:
            future.set_result(StepResult(plan.number, [], []))
        return future

    def close(self) -> None: ...


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
    thread.join(5)
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
    """So does the step planned behind it, which was not run: it is no failure of this rank."""
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
