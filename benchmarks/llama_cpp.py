"""This engine's server against llama.cpp's on the same GGUF files of one random checkpoint, in turn.

Needs llama.cpp's llama-server, built for this machine. Each format is exported once; both sides read that file. In
each round both get the same new prompts of token ids over HTTP, without streaming, and answer each workload greedily
and without end of sequence. Prints tokens per second and the ratio, medians of the rounds, least and largest in
brackets.

    python -m benchmarks.llama_cpp --llama-server ~/llama.cpp/build/bin/llama-server
    python -m benchmarks.llama_cpp --llama-server llama-server --shape dense-101m --formats BF16 --workloads W1
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.checkpoints import SHAPES, ensure_checkpoint
from benchmarks.gguf_export import export
from benchmarks.server_process import ServerProcess
from benchmarks.workloads import WORKLOADS, Workload
from moe_engine.processes.addresses import free_port
from moe_engine.processes.child import end_with_parent
from moe_engine.tuning.stats import median

START_SECONDS = 120
ANSWER_SECONDS = 600
KV_TOKENS = 32768


class HttpSide:
    """Sends the prompts of a workload at once, each over a connection of its own."""

    name: str

    def __init__(self, url: str, num_streams: int) -> None:
        self._url = url
        self._streams = ThreadPoolExecutor(num_streams)

    def run(self, prompts: list[list[int]], output_len: int) -> float:
        """Seconds until all prompts, sent at once, are answered."""
        began = time.perf_counter()
        for count in self._streams.map(lambda ids: self._answer(ids, output_len), prompts):
            if count != output_len:
                raise RuntimeError(f"{self.name} answered {count} tokens, not {output_len}")
        return time.perf_counter() - began

    def close(self) -> None:
        self._streams.shutdown(cancel_futures=True)

    def _answer(self, ids: list[int], output_len: int) -> int:
        """Number of tokens of the answer."""
        raise NotImplementedError

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


class OurServer(HttpSide):
    """``moe-engine serve``."""

    name = "moe-engine"

    def __init__(self, path: Path, num_streams: int, threads: int) -> None:
        flags = {"model-path": path, "max-total-tokens": KV_TOKENS, "cpu-threads": threads, "device": "cpu"}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        self._server = ServerProcess([*words, "--skip-tokenizer-init"])
        self._server.wait_ready()
        super().__init__(self._server.base_url, num_streams)

    def close(self) -> None:
        super().close()
        self._server.stop()

    def _answer(self, ids: list[int], output_len: int) -> int:
        sampling = {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": True}
        found = self._post("/generate", {"input_ids": ids, "sampling_params": sampling})
        return int(found["meta_info"]["completion_tokens"])


class LlamaServer(HttpSide):
    """llama-server with one slot for each stream, on a free port.

    Raises:
        RuntimeError: it does not start within `START_SECONDS`.
    """

    name = "llama.cpp"

    def __init__(self, binary: str, path: Path, num_streams: int, stream_tokens: int, threads: int) -> None:
        super().__init__(f"http://127.0.0.1:{(port := free_port())}", num_streams)
        command = [
            *binary.split(), "--model", str(path), "--port", str(port), "--host", "127.0.0.1",
            "--threads", str(threads), "--parallel", str(num_streams), "--ctx-size", str(num_streams * stream_tokens),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent
        )
        limit = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > limit:
                self.close()
                raise RuntimeError(f"{' '.join(command)}: did not start; run it to see why")
            time.sleep(0.1)

    def close(self) -> None:
        super().close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, ids: list[int], output_len: int) -> int:
        asked = {
            "prompt": ids, "n_predict": output_len, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
        }  # fmt: skip
        return int(self._post("/completion", asked)["tokens_predicted"])

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def measure(
    ours: HttpSide, theirs: HttpSide, workloads: Sequence[Workload], vocab_size: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Tokens per second (this engine, llama.cpp) of each round by workload; a round before them warms up."""
    found: dict[str, list[tuple[float, float]]] = {workload.name: [] for workload in workloads}
    for turn in range(-1, rounds):
        for workload in workloads:
            prompts = workload.prompts(vocab_size, seed=turn)
            seconds = ours.run(prompts, workload.output_len), theirs.run(prompts, workload.output_len)
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
    parser = report.command_parser("llama_cpp", __doc__)
    parser.add_argument("--llama-server", required=True, help="llama.cpp's program")
    parser.add_argument("--shape", default="moe-390m", choices=sorted(SHAPES), help="random checkpoint of this shape")
    parser.add_argument("--formats", nargs="+", default=["Q4_0", "Q8_0"], choices=("BF16", "Q4_0", "Q8_0"))
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W4"], choices=sorted(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of either side")
    parser.add_argument("--quick", action="store_true", help="small workloads: a smoke test, no figures")
    report.add_result_options(parser)
    own = parser.parse_args(argv)
    if not own.quick:
        report.wait_until_quiet(own)
    source = ensure_checkpoint(own.shape)
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    chosen = [WORKLOADS[name].shortened() if own.quick else WORKLOADS[name] for name in own.workloads]
    streams = max(workload.num_streams for workload in chosen)
    longest = max(workload.input_len + workload.output_len for workload in chosen) + 8
    found: dict[str, Any] = {}
    for kind in own.formats:
        path = source / f"{own.shape}-{kind.lower()}.gguf"
        if not path.is_file():
            export(source, path, kind)
        with ExitStack() as sides:
            theirs = sides.enter_context(closing(LlamaServer(own.llama_server, path, streams, longest, own.threads)))
            ours = sides.enter_context(closing(OurServer(path, streams, own.threads)))
            found[kind] = measure(ours, theirs, chosen, vocab_size, own.rounds)
        print("\n".join(line(kind, workload, found[kind][workload.name]) for workload in chosen), flush=True)
    if not own.quick:
        report.write_if_asked(own, f"llama_cpp_{own.shape}", {"tokens_per_second": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
