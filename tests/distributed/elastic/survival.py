"""An engine with ranks that are killed or stopped, requests streamed meanwhile, and the answers of a single rank."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from moe_engine import Engine
from moe_engine.errors import MoeEngineError
from tests.distributed.ranks.drill import ended
from tests.fork_server import children
from tests.waiting import until

ORDINARY = 250  # token ids from here on are special
KERNELS = {"max_total_tokens": 8192, "dtype": "float32", "cpu_threads": 1, "skip_tokenizer_init": True}
TIE = 1e-4
"""Difference of two log-probabilities whose order float32 rounding can reverse."""
WAIT_SECONDS = 120.0
"""Time limit, far above the real duration."""


@dataclass
class Stream:
    """A streamed request: the pieces received so far, and how it ended."""

    prompt: list[int]
    sampling: dict[str, Any]
    rank: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request."""
    tokens: list[int] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)
    meta: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    comparable: int | None = None
    """Tokens before the first tie of a single rank's two best tokens; None: no tie."""
    ended: threading.Event = field(default_factory=threading.Event)

    def begin(self, engine: Engine) -> Stream:
        threading.Thread(target=self._run, args=(engine,), daemon=True).start()
        return self

    def _run(self, engine: Engine) -> None:
        try:
            asyncio.run(self._read(engine))
        except MoeEngineError as error:
            self.error = str(error)
        finally:
            self.ended.set()

    async def _read(self, engine: Engine) -> None:
        async for chunk in await engine.async_generate(
            input_ids=self.prompt,
            sampling_params=self.sampling,
            stream=True,
            return_logprob=True,
            logprob_start_len=0,
            routed_dp_rank=self.rank,
            **self.more,
        ):  # type: ignore[union-attr]
            assert chunk["output_ids"][: len(self.tokens)] == self.tokens, "earlier tokens changed"
            self.tokens, self.meta = chunk["output_ids"], chunk["meta_info"]
            self.cached.add(self.meta["cached_tokens"])


def draw(seed: int, count: int, num_tokens: int, ranks: Sequence[int], length: int = 12) -> list[Stream]:
    """Greedy and seeded requests, distributed over the ranks; some with penalties, which depend on earlier tokens."""
    rng = random.Random(seed)
    streams = []
    for i in range(count):
        sampling: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0}
        if i % 2:
            sampling |= {"temperature": 0.9, "top_p": 0.9, "sampling_seed": rng.getrandbits(40)}
        if i % 3 == 2:
            sampling |= {"frequency_penalty": 0.7, "min_new_tokens": num_tokens // 2}
        prompt = [rng.randrange(ORDINARY) for _ in range(rng.randint(max(2, length // 2), length))]
        streams.append(Stream(prompt, sampling, ranks[i % len(ranks)]))
    return streams


class Struck:
    """An engine of several ranks, each a separate attention group."""

    def __init__(self, path: Path, num_ranks: int, redundant: int, **flags: Any) -> None:
        self.engine = Engine(
            str(path),
            tp_size=num_ranks,
            attn_dp_size=num_ranks,
            enable_dp_lm_head=True,
            moe_dense_tp_size=1,
            ep_num_redundant_experts=redundant,
            elastic_ep=True,
            **{**KERNELS, "moe_a2a_backend": "all_to_all", **flags},
        )
        self.supervisor = psutil.Process(self.engine._cores[0].pid)
        self.ranks = sorted(children(self.supervisor), key=lambda process: (process.create_time(), process.pid))

    def strike(self, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        self.ranks[rank].send_signal(how)

    def wait_alive(self, count: int) -> None:
        """Waits until `count` schedulers survive and each reports as many: answers may end before a loss is noticed."""

        def alive() -> bool:
            states = self.engine.get_server_info()["internal_states"]
            return [state["alive_groups"] for state in states] == [count] * count

        until(alive, f"{count} groups are not alive")

    def problems(self) -> list[Any]:
        """Integrity problems of all schedulers."""
        found = self.engine._loop.run(self.engine._frontend.client.call("check_integrity"))
        return [problem for part in found for problem in part]


@contextmanager
def struck(path: Path, num_ranks: int, redundant: int, **flags: Any) -> Iterator[Struck]:
    running = Struck(path, num_ranks, redundant, **flags)
    try:
        yield running
    finally:
        running.engine.shutdown()
    until(lambda: all(map(ended, [running.supervisor, *running.ranks])), "a process remains")


def alone(path: Path, streams: Sequence[Stream], **flags: Any) -> list[list[int]]:
    """Computes the tokens on a single undisturbed rank. Sets `comparable` of the streams."""
    with Engine(str(path), **{**KERNELS, **flags}) as engine:
        answers: Any = engine.generate(
            input_ids=[stream.prompt for stream in streams],
            sampling_params=[stream.sampling for stream in streams],
            return_logprob=True,
            top_logprobs_num=2,
            **{name: [stream.more.get(name) for stream in streams] for name in ("custom_logit_processor", "lora_path")},
        )
    for stream, answer in zip(streams, answers):
        best = answer["meta_info"]["output_top_logprobs"]
        ties = [i for i, (first, second) in enumerate(best) if first[0] - second[0] < TIE]
        stream.comparable = ties[0] if ties and not stream.sampling["temperature"] else None
    return [answer["output_ids"] for answer in answers]


def finish(streams: Sequence[Stream]) -> None:
    for stream in streams:
        assert stream.ended.wait(WAIT_SECONDS), "a request never ended"
