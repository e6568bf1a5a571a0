"""Options of the serving benchmark: headers, sampling, adapters, profile, wait for the server. No command."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx

from moe_engine.tuning.datasets import BenchRequest

POLL_SECONDS = 0.2


def add_request_arguments(group: Any) -> None:
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--header", nargs="+", default=[], metavar="NAME=VALUE", help="headers of every request")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=60, metavar="SECONDS", help="longest wait for the server"
    )
    group.add_argument("--lora-name", nargs="+", default=[], metavar="NAME", help="LoRA adapters of the requests")
    group.add_argument(
        "--lora-request-distribution",
        default="uniform",
        choices=("uniform", "distinct", "skewed"),
        help="uniform: drawn; distinct: in turn; skewed: drawn, each --lora-zipf-alpha times as often as the next",
    )
    group.add_argument("--lora-zipf-alpha", type=float, default=1.5, metavar="FACTOR")
    group.add_argument("--profile", action="store_true", help="record a profile of the server during the load")
    group.add_argument("--profile-num-steps", type=int, metavar="STEPS", help="steps of the profile; default: all")
    group.add_argument("--profile-output-dir", metavar="FOLDER", help="the server's folder for the profile")


def headers_of(args: argparse.Namespace) -> dict[str, str]:
    """Raises ValueError: a header without a name or a value."""
    found = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    for word in args.header:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise ValueError(f"--header {word}: must be NAME=VALUE")
        found[name] = value
    return found


def sampling_of(args: argparse.Namespace) -> dict[str, float]:
    return {"temperature": args.temperature} | ({"top_p": args.top_p} if args.top_p < 1 else {})


def with_adapters(requests: Sequence[BenchRequest], args: argparse.Namespace) -> list[BenchRequest]:
    """The requests, each with an adapter of `--lora-name`. Raises ValueError for a factor of 1 or less."""
    names: list[str] = args.lora_name
    if not names:
        return list(requests)
    if args.lora_request_distribution == "distinct":
        chosen = [names[i % len(names)] for i in range(len(requests))]
    else:
        if args.lora_zipf_alpha <= 1:
            raise ValueError(f"--lora-zipf-alpha is {args.lora_zipf_alpha}; it must be above 1")
        skewed = args.lora_request_distribution == "skewed"
        weights = [args.lora_zipf_alpha**-i if skewed else 1.0 for i in range(len(names))]
        chosen = random.Random(args.seed).choices(names, weights, k=len(requests))
    return [replace(request, lora=name) for request, name in zip(requests, chosen, strict=True)]


async def wait_until_ready(client: httpx.AsyncClient, base_url: str, seconds: float) -> None:
    """Returns once the server answers. Raises ValueError after `seconds`; 0: does not wait."""
    deadline = time.monotonic() + seconds
    is_shown = False
    while seconds > 0:
        try:
            if (await client.get(base_url + "/health", timeout=5)).status_code < 500:
                return
            reason = "it is not ready"
        except httpx.UnsupportedProtocol as error:  # waiting does not help
            raise ValueError(f"--base-url {base_url}: {error} Write it as http://HOST:PORT") from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
        if not is_shown:
            is_shown = True
            print(f"waiting for a server at {base_url} ({reason}), at most {seconds:g} s", file=sys.stderr)
        if time.monotonic() >= deadline:
            raise ValueError(
                f"no server is ready at {base_url} after {seconds:g} s (--ready-check-timeout-sec): {reason}; "
                "start it, or check --host, --port and --base-url"
            )
        await asyncio.sleep(POLL_SECONDS)


@asynccontextmanager
async def profiled(client: httpx.AsyncClient, base_url: str, args: argparse.Namespace) -> AsyncIterator[None]:
    """Records a profile of the server with `--profile`."""
    if not args.profile:
        yield
        return
    asked = {"num_steps": args.profile_num_steps, "output_dir": args.profile_output_dir}
    body = {name: value for name, value in asked.items() if value is not None}
    (await client.post(base_url + "/start_profile", json=body)).raise_for_status()
    try:
        yield
    finally:
        if args.profile_num_steps is None:
            (await client.post(base_url + "/stop_profile", timeout=600)).raise_for_status()
