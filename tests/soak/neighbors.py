"""Clients that only stream: the gaps between their events measure the influence of other clients.

They run in a separate process, so that a busy client process does not look like a busy server.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

from tests.soak.http import Connection

LENGTH = 64
END = -1
PROMPT = {"text": "A paragraph about France:"}
BODY: dict[str, Any] = {
    **PROMPT,
    "stream": True,
    "sampling_params": {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True},
}


class Neighbors:
    """`count` streams in a process, from the first answer until `finish`."""

    def __init__(self, port: int, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(port, count, theirs), daemon=True)
        self._process.start()
        self.gaps(count)

    def gaps(self, least: int = 1) -> list[float]:
        """The gaps since the last call in seconds, sorted; `least`: waits for this number of gaps."""
        self._pipe.send(least)
        return sorted(self._pipe.recv())

    def finish(self) -> list[str]:
        """Ends the streams. Returns answers that differ between repetitions, or are missing."""
        self._pipe.send(END)
        problems: list[str] = self._pipe.recv()
        self._process.join()
        return problems


def _run(port: int, count: int, pipe: Pipe) -> None:
    asyncio.run(_stream_all(port, count, pipe))


async def _stream_all(port: int, count: int, pipe: Pipe) -> None:
    gaps: list[float] = []
    problems: list[str] = []
    texts: set[str] = set()
    streams = [asyncio.create_task(_stream(port, gaps, texts, problems)) for _ in range(count)]
    while True:
        least = await asyncio.to_thread(pipe.recv)
        if least == END:
            break
        while len(gaps) < least and not problems:
            await asyncio.sleep(0.01)
        pipe.send(gaps[:])
        gaps.clear()
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    if len(texts) > 1:
        problems.append(f"one question, {len(texts)} answers: {texts}")
    pipe.send(problems)


async def _stream(port: int, gaps: list[float], texts: set[str], problems: list[str]) -> None:
    connection = Connection(port)
    while True:
        try:
            response = await connection.send("POST", "/generate", BODY)
            if response.status != 200:
                problems.append(f"status {response.status}: {(await response.read())[:300]!r}")
                continue
            last, text = 0.0, ""
            async for event in response.events():
                now = time.perf_counter()
                if last:
                    gaps.append(now - last)
                last, text = now, event["text"]
            texts.add(text)
        except (OSError, EOFError, KeyError) as error:
            problems.append(f"{type(error).__name__}: {error}")
            connection.drop()
            await asyncio.sleep(0.1)


def quantile(gaps: Sequence[float], share: float) -> float:
    """A quantile of sorted gaps."""
    return gaps[min(len(gaps) - 1, int(share * len(gaps)))]
