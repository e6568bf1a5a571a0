"""Sessions of many turns in a closed loop over a scheduler, in virtual time: each sends its next turn after a pause."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from moe_engine.scheduler import NEEDS_RESULT, Scheduler, SchedulerConfig
from moe_engine.types import Request, StepPlan, StepResult
from tests.scheduler.simulator import make_request


@dataclass(frozen=True)
class Shape:
    """Properties of sessions, and costs of a step. Lengths are in tokens, times in seconds."""

    pool: int = 4000
    rows: int = 8
    prompt: tuple[int, int] = (350, 350)
    turn: tuple[int, int] = (10, 10)
    output: tuple[int, int] = (10, 10)
    num_turns: float = 10.0
    """Mean of a geometric distribution; `fixed_turns`: the number itself."""
    fixed_turns: bool = True
    pause: float = 0.05
    pauses: str = "uniform"
    step: float = 0.02
    token: float = 0.0005
    """Time of each prompt token."""
    decode: float = 0.0
    """Time of each decoding request."""
    load: float = 0.0
    """Time of each token loaded from the host tier."""

    @property
    def footprint(self) -> float:
        """Mean tokens of a session halfway through its turns."""
        grown = (sum(self.turn) + sum(self.output)) / 2
        return sum(self.prompt) / 2 + grown * (self.num_turns + 1) / 2


@dataclass
class Session:
    number: int
    text: list[int]
    left: int
    due: float = 0.0
    turns: int = 0
    request: Request | None = None


class LeanWorker:
    """Returns arbitrary tokens for plans; a load of KV takes time."""

    def __init__(self) -> None:
        self.queue: deque[StepPlan] = deque()
        self.loads: list[tuple[int, int]] = []
        """(number, tokens) of started loads."""

    def submit(self, plan: StepPlan) -> None:
        self.queue.append(plan)
        if plan.kv_ops is not None:
            self.loads += [(load.id, len(load.slots)) for load in plan.kv_ops.loads]

    def execute(self) -> StepResult:
        plan = self.queue.popleft()
        rows = [row for i, row in enumerate(plan.rows) if i < plan.num_decodes or plan.samples[i]]
        return StepResult(plan.number, rows, [[2] for _ in rows])


@dataclass
class Load:
    shape: Shape
    num_sessions: int
    config: SchedulerConfig
    seed: int = 5
    now: float = 0.0
    num_tokens: int = 0
    num_computed: int = 0
    waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.scheduler = Scheduler(self.config, clock=lambda: self.now)
        self.worker = LeanWorker()
        self.loading: list[tuple[float, int]] = []
        self.sessions = [self.begin(Session(i, [], 0)) for i in range(self.num_sessions)]
        for session in self.sessions:  # sessions that fit start at a random turn
            session.due = self.rng.uniform(0, 2 * self.shape.pause)
            if session.number * self.shape.footprint > self.shape.pool:
                continue  # waits for its first turn
            for _ in range(self.rng.randrange(session.left)):
                if len(session.text) > self.config.context_len // 2:
                    break
                session.left -= 1
                session.text += self.text(self.rng.randint(*self.shape.turn) + self.rng.randint(*self.shape.output))
        self.running: dict[str, Session] = {}

    def begin(self, session: Session) -> Session:
        shape, rng = self.shape, self.rng
        session.text = self.text(rng.randint(*shape.prompt))
        session.left = int(shape.num_turns)
        if not shape.fixed_turns:
            session.left = 1
            while rng.random() > 1 / shape.num_turns:
                session.left += 1
        return session

    def text(self, count: int) -> list[int]:
        return self.rng.choices(range(3, 60_000), k=count)

    def draw_pause(self) -> float:
        rng, pause = self.rng, self.shape.pause
        if self.shape.pauses == "exponential":
            return rng.expovariate(1 / pause)
        if self.shape.pauses == "lognormal":
            return rng.lognormvariate(0.0, 1.0) * pause / 1.65
        if self.shape.pauses == "two":  # pauses of tools and of users
            return pause * (rng.uniform(0.1, 0.3) if rng.random() < 0.8 else rng.uniform(3.0, 5.0))
        return pause * rng.uniform(0.5, 1.5)

    def arrivals(self) -> None:
        for session in self.sessions:
            if session.request is None and session.due <= self.now:
                session.turns += 1
                output = self.rng.randint(*self.shape.output)
                rid = f"{session.number}.{session.turns}"
                session.request = make_request(rid, list(session.text), output, eos=False, ignore_eos=True)
                self.running[rid] = session
                self.scheduler.add(session.request)

    def step(self) -> None:
        self.arrivals()
        if due := [number for at, number in self.loading if at <= self.now]:
            self.loading = [each for each in self.loading if each[0] > self.now]
            self.scheduler.kv_arrived(due)
        plan = self.scheduler.schedule()
        if plan is None or plan is NEEDS_RESULT:
            self.now += 0.001
            return
        assert isinstance(plan, StepPlan)
        self.worker.submit(plan)
        result = self.worker.execute()
        shape, num_prompt = self.shape, plan.num_tokens - plan.num_decodes
        if plan.rows:
            self.now += shape.step + shape.token * num_prompt + shape.decode * plan.num_decodes
        for number, count in self.worker.loads:
            self.loading.append((self.now + shape.load * count, number))
        self.worker.loads = []
        self.num_computed += num_prompt
        for event in self.scheduler.update(result):
            if event.finish_reason:
                self.ended(self.running.pop(event.rid))

    def ended(self, session: Session) -> None:
        request = session.request
        assert request is not None and request.first_scheduled is not None
        self.waits.append(request.first_scheduled - request.queued_at)
        self.num_tokens += len(request.output_ids)
        session.text = [*request.prompt_ids, *request.output_ids, *self.text(self.rng.randint(*self.shape.turn))]
        session.due, session.request = self.now + self.draw_pause(), None
        session.left -= 1
        if session.left <= 0 or len(session.text) + self.shape.output[1] > self.config.context_len - 2:
            self.begin(session)  # a new conversation replaces the old one

    def run(self, seconds: float, warm: float = 20.0) -> float:
        """Output tokens per second, without the first seconds."""
        while self.now < warm:
            self.step()
        begin, self.num_tokens, self.num_computed, self.waits = self.now, 0, 0, []
        while self.now < begin + seconds:
            self.step()
        assert self.scheduler.check_integrity() == []
        return self.num_tokens / (self.now - begin)
