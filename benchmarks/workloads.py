"""The four workloads of `side_by_side`, the target, and the best other engine on each workload. No command."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from benchmarks.step_work import MachineLimits, ModelWork

TARGET = 0.85
"""Share of the machine's limit, on every workload."""


@dataclass(frozen=True)
class Peer:
    """The best other engine of a workload, and the fraction of its machine's limit that it reached."""

    name: str
    fraction: float


@dataclass(frozen=True)
class Workload:
    """`num_streams` greedy requests at once, each with `shared_len` common and `own_len` separate prompt tokens."""

    name: str
    num_streams: int
    own_len: int
    output_len: int
    shared_len: int = 0

    @property
    def input_len(self) -> int:
        return self.shared_len + self.own_len

    @property
    def counted_tokens(self) -> int:
        """The tokens counted by the rate: output tokens, or prompt tokens if the answer is a single token."""
        return self.num_streams * (self.output_len if self.output_len > 1 else self.input_len)

    @property
    def text(self) -> str:
        shared = f"({self.shared_len} shared + {self.own_len} own)" if self.shared_len else str(self.own_len)
        return f"{self.num_streams} x {shared} in, {self.output_len} out"

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """New prompts of random tokens; a new seed gives uncached prompts. Without special ids."""
        rng = random.Random(f"{self.name} {seed}")
        plain = range(min(16, vocab_size // 2), vocab_size)
        shared = rng.choices(plain, k=self.shared_len)
        return [shared + rng.choices(plain, k=self.own_len) for _ in range(self.num_streams)]

    def limit(self, work: ModelWork, machine: MachineLimits) -> float:
        """Tokens per second (of `counted_tokens`) of a perfect engine."""
        return self.counted_tokens / work.generation_seconds(
            machine, self.num_streams, self.input_len, self.output_len, self.shared_len
        )

    def shortened(self) -> Workload:
        """A small workload of the same kind, for smoke tests; its figures are meaningless."""
        return replace(
            self,
            num_streams=min(self.num_streams, 4),
            own_len=max(8, self.own_len // 8),
            shared_len=self.shared_len // 8,
            output_len=max(1, self.output_len // 16),
        )

    def probe(self) -> Workload:
        """A small sample for comparing modes: fewer tokens, the same proportions of work."""
        if self.output_len == 1:
            return replace(self, own_len=min(self.own_len, 512))
        return replace(
            self, own_len=min(self.own_len, 32), shared_len=min(self.shared_len, 96), output_len=min(self.output_len, 8)
        )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", num_streams=1, own_len=128, output_len=128),
        Workload("W2", num_streams=16, own_len=128, output_len=64),
        Workload("W3", num_streams=32, own_len=32, output_len=32, shared_len=512),
        Workload("W4", num_streams=1, own_len=2048, output_len=1),
    )
}

PEERS = {
    "moe-390m": {
        "W1": Peer("llama.cpp", 0.63),
        "W2": Peer("SGLang CPU", 0.54),
        "W3": Peer("vLLM CPU", 0.63),
        "W4": Peer("SGLang CPU", 0.42),
    },
    "dense-101m": {
        "W1": Peer("llama.cpp", 0.50),
        "W2": Peer("vLLM CPU", 0.42),
        "W4": Peer("vLLM CPU", 0.55),
    },
}
"""By checkpoint shape and workload; measured on two cores of a Xeon with AMX."""
