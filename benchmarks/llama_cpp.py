"""This engine against llama.cpp on the same GGUF files of one random checkpoint, in turn.

Needs llama.cpp's llama-server, built for this machine. Each format is exported once; both sides read that file. In
each round both run each workload with the same new prompts of token ids, greedily and without end of sequence. Prints
tokens per second and the ratio, medians of the rounds, least and largest in brackets.

    python -m benchmarks.llama_cpp --llama-server ~/llama.cpp/build/bin/llama-server
    python -m benchmarks.llama_cpp --llama-server llama-server --formats Q4_0 --workloads W1 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, ensure_checkpoint
from benchmarks.gguf_export import export
from benchmarks.peers import EngineSide
from benchmarks.workloads import WORKLOADS, Workload
from moe_engine.processes.addresses import free_port
from moe_engine.tuning.stats import median

START_SECONDS = 120
ANSWER_SECONDS = 600
KV_TOKENS = 32768


class LlamaServer:
    """llama-server with one slot for each stream, on a free port.

    Raises:
        RuntimeError: it does not start within `START_SECONDS`.
    """

    name = "llama.cpp"

    def __init__(self, binary: str, path: Path, num_streams: int, stream_tokens: int, threads: int) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        command = [
            *binary.split(), "--model", str(path), "--port", str(port), "--host", "127.0.0.1",
            "--threads", str(threads), "--parallel", str(num_streams), "--ctx-size", str(num_streams * stream_tokens),
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._streams = ThreadPoolExecutor(num_streams)
        limit = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > limit:
                self.close()
                raise RuntimeError(f"{' '.join(command)}: did not start; run it to see why")
            time.sleep(0.1)

    def run(self, prompts: list[list[int]], output_len: int) -> float:
        """Seconds until all prompts, sent at once, are answered."""
        began = time.perf_counter()
        for count in self._streams.map(lambda ids: self._answer(ids, output_len), prompts):
            if count != output_len:
                raise RuntimeError(f"llama.cpp answered {count} tokens, not {output_len}")
        return time.perf_counter() - began

    def close(self) -> None:
        self._streams.shutdown(cancel_futures=True)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, ids: list[int], output_len: int) -> int:
        """Number of tokens of the answer."""
        asked = {
            "prompt": ids, "n_predict": output_len, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
        return int(found["tokens_predicted"])

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def measure(
    ours: EngineSide, theirs: LlamaServer, workloads: Sequence[Workload], vocab_size: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Tokens per second (this engine, llama.cpp) of each round by workload; a round before them warms up."""
    found: dict[str, list[tuple[float, float]]] = {workload.name: [] for workload in workloads}
    for turn in range(-1, rounds):
        for workload in workloads:
            prompts = workload.prompts(vocab_size, seed=turn)
            seconds = ours.run(prompts, workload.output_len).seconds, theirs.run(prompts, workload.output_len)
            if turn >= 0:
                found[workload.name].append(
                    (workload.counted_tokens / seconds[0], workload.counted_tokens / seconds[1])
                )
    return found


def line(kind: str, workload: Workload, rates: list[tuple[float, float]]) -> str:
    ratios = [own / other for own, other in rates]
    own, other = (median([rate[i] for rate in rates]) for i in range(2))
    spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"{kind:5} {workload.name}: ours {own:8.1f} tokens/s   llama.cpp {other:8.1f} tokens/s   ratio {spread}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="moe-engine bench llama_cpp", description=__doc__.splitlines()[0])
    parser.add_argument("--llama-server", required=True, help="llama.cpp's program")
    parser.add_argument("--shape", default="moe-390m", choices=sorted(SHAPES), help="random checkpoint of this shape")
    parser.add_argument("--formats", nargs="+", default=["Q4_0", "Q8_0"], choices=("Q4_0", "Q8_0"))
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W4"], choices=sorted(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of either side")
    parser.add_argument("--quick", action="store_true", help="small workloads: a smoke test, no figures")
    own = parser.parse_args(argv)
    source = ensure_checkpoint(own.shape)
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    chosen = [WORKLOADS[name].shortened() if own.quick else WORKLOADS[name] for name in own.workloads]
    streams = max(workload.num_streams for workload in chosen)
    longest = max(workload.input_len + workload.output_len for workload in chosen) + 8
    for kind in own.formats:
        path = source / f"{own.shape}-{kind.lower()}.gguf"
        if not path.is_file():
            export(source, path, kind)
        flags = {"max_total_tokens": KV_TOKENS, "cpu_threads": own.threads, "device": "cpu", "random_seed": 0}
        theirs = LlamaServer(own.llama_server, path, streams, longest, own.threads)
        try:
            ours = EngineSide(path, flags)
            try:
                rates = measure(ours, theirs, chosen, vocab_size, own.rounds)
            finally:
                ours.close()
        finally:
            theirs.close()
        print("\n".join(line(kind, workload, rates[workload.name]) for workload in chosen), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
