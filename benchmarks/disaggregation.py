"""Time to first token of prefill and decode servers against one server: ``python -m benchmarks.disaggregation``.

One server, and a prefill and a decode server for each transport, all on this machine with the same flags. Each round
sends one new prompt to each of them in turn, without other load; an idle server uses no processor time. The pair's
additional time is the part of the transfer that does not overlap with the prefill, and the last token's step.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks import checkpoints, report
from benchmarks.server_process import ServerProcess
from moe_engine.processes.addresses import free_port
from moe_engine.tuning.stats import median, spread

FIRST_ID = 100
"""Smallest token id of a prompt: special tokens have lower ids."""
TARGET = 1.15


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = report.command_parser("disaggregation", __doc__)
    parser.add_argument("--model-path", help="default: the random checkpoint of --shape")
    parser.add_argument("--shape", default="moe-390m", help="of `benchmarks.checkpoints`")
    parser.add_argument("--input-len", type=int, default=2048)
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--chunked-prefill-size", type=int, default=512)
    parser.add_argument("--transports", nargs="+", default=["tcp", "shm"], help="--disaggregation-transfer-backend")
    parser.add_argument("--rounds", type=int, default=7)
    report.add_result_options(parser)
    return parser.parse_args(argv)


class Pair:
    def __init__(self, flags: list[str], transport: str) -> None:
        self.bootstrap = free_port()
        mode = ["--disaggregation-transfer-backend", transport, "--disaggregation-bootstrap-port", str(self.bootstrap)]
        self.prefill, self.decode = (
            ServerProcess([*flags, *mode, "--disaggregation-mode", side]) for side in ("prefill", "decode")
        )


def first_token(client: httpx.Client, url: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token, and the last event.

    Args:
        client: created in advance, because its creation takes longer than a request.
    """
    began, first, last = time.perf_counter(), 0.0, ""
    with client.stream("POST", url + "/generate", json=body | {"stream": True}) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{url}: {answer.read().decode()}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first, last = first or time.perf_counter() - began, line[6:]
    return first, json.loads(last)


def run_pair(client: httpx.Client, pair: Pair, body: dict[str, Any], rng: random.Random) -> float:
    """As a router: the same request to both servers at the same time.

    Raises:
        RuntimeError: the decode server computed the prompt itself.
    """
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.bootstrap, "bootstrap_room": rng.getrandbits(62)}
    whole = body | room
    beside = threading.Thread(target=lambda: client.post(pair.prefill.base_url + "/generate", json=whole), daemon=True)
    beside.start()
    seconds, answer = first_token(client, pair.decode.base_url, whole)
    beside.join()
    if answer["meta_info"]["cached_tokens"] < len(body["input_ids"]) * 0.9:
        raise RuntimeError(f"the KV did not arrive:\n{pair.decode.tail()}")
    return seconds


def main(argv: list[str] | None = None) -> int:
    own = parse_arguments(argv)
    report.wait_until_quiet(own)
    model = own.model_path or str(checkpoints.ensure_checkpoint(own.shape))
    vocabulary = range(FIRST_ID, json.loads(Path(model, "config.json").read_text())["vocab_size"])
    length = own.input_len + own.output_len + 64
    flags = [
        *("--model-path", model, "--host", "127.0.0.1", "--context-length", str(length)),
        *("--chunked-prefill-size", str(own.chunked_prefill_size), "--max-total-tokens", str(4 * length)),
        *("--max-running-requests", "4"),
    ]
    rng, rounds = random.Random(), []
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=600))
        single = stack.enter_context(ServerProcess(flags))
        single.wait_ready()
        pairs: dict[str, Pair] = {}
        for transport in own.transports:
            pair = pairs[transport] = Pair(flags, transport)
            for server in (pair.prefill, pair.decode):
                stack.enter_context(server).wait_ready()
        for number in range(own.rounds + 1):
            found: dict[str, float] = {}
            for name in rng.sample(["one", *pairs], len(pairs) + 1):
                body = {
                    "input_ids": rng.choices(vocabulary, k=own.input_len),
                    "sampling_params": {"temperature": 0, "max_new_tokens": own.output_len, "ignore_eos": True},
                }
                if name == "one":
                    found[name] = first_token(client, single.base_url, body)[0]
                else:
                    found[name] = run_pair(client, pairs[name], body, rng)
            if number:  # the first round warms up
                rounds.append(found)
                print(json.dumps({name: round(seconds, 3) for name, seconds in found.items()}), flush=True)
    summary: dict[str, Any] = {"one server, seconds": median([found["one"] for found in rounds])}
    for transport in pairs:
        ratios = [found[transport] / found["one"] for found in rounds]
        summary[transport] = {"ratio": median(ratios), "spread": spread(ratios), "target": TARGET}
    print(json.dumps(summary, indent=1))
    options = {name: getattr(own, name) for name in ("input_len", "output_len", "chunked_prefill_size", "shape")}
    report.write_if_asked(own, "disaggregation", {"options": options, "summary": summary, "rounds": rounds})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
