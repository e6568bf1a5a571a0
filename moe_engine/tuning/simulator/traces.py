"""Recorded arrivals: a JSONL file of requests, a trace in Mooncake's format, or the CSV files of BurstGPT and of
Azure's LLM inference traces; each also compressed (``.gz``).

A line of Mooncake's has ``timestamp`` (milliseconds), ``input_length``, ``output_length`` and ``hash_ids``, one for
each 512 tokens of the prompt: equal ids are equal text; optionally ``session_id`` and, in place of ``timestamp`` after
its first turn, ``delay`` (milliseconds after the previous answer). A line of the other format has ``arrival``
(seconds), ``input_len``, ``output_len`` and, optionally, ``max_tokens`` and ``prefix_len`` with ``prefix_id``: requests
with the same id share this many tokens. Requests without answer tokens failed, and are left out in each format.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

from moe_engine.errors import ConfigError
from moe_engine.kernels.host_memory import host_memory
from moe_engine.tuning.simulator.workload import OWN_TOKEN_BYTES, Arrival, Numbers

MOONCAKE_BLOCK = 512
"""Tokens of a block with an entry of ``hash_ids`` (the published traces)."""
MOST_TOKENS = 1 << 24
"""Max length of a prompt or an answer: longer ones are errors of the trace."""
MOST_TIME = 1e13
"""Times may count from 1970, also in milliseconds."""
BLOCKS_FROM = 1 << 50
CSV_COLUMNS = (("Timestamp", "Request tokens", "Response tokens"), ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
"""Time, prompt and answer tokens in the published files."""
PREFIXES_FROM = 1 << 55
T = TypeVar("T")


def read_trace(path: str, limit: int | None = None) -> list[Arrival]:
    """The requests of a trace, in any of the formats; at most the first `limit`.

    Raises:
        ConfigError: no such file, or a line that is not a request, with its number.
    """
    try:
        with _open(path) as file:
            is_table = path.lower().removesuffix(".gz").endswith(".csv")
            requests = _of_table(path, file) if is_table else _of_lines(path, file)
            found = _fitting(path, islice((arrival for arrival in requests if arrival.output_len), limit))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "not a text file"
        reason = "the compressed file is cut off" if isinstance(error, EOFError) else reason
        raise ConfigError(f"--dataset-path {path}: cannot read it: {reason}") from None
    if not found:
        raise ConfigError(f"--dataset-path {path}: has no request with answer tokens")
    first = min(arrival.seconds for arrival in found)
    for arrival in found:
        arrival.seconds -= first
    return found


def _fitting(path: str, requests: Iterator[Arrival]) -> list[Arrival]:
    """The requests. Raises ConfigError: their prompts do not fit into memory."""
    found: list[Arrival] = []
    tokens, most = 0, host_memory().available_bytes // OWN_TOKEN_BYTES
    for arrival in requests:
        tokens += len(arrival.prompt_ids)
        if tokens > most:
            raise ConfigError(
                f"--dataset-path {path}: the prompts of its first {len(found) + 1} requests have {tokens} tokens, of "
                f"which {most} fit into memory; give a smaller --num-prompts"
            )
        found.append(arrival)
    return found


def _open(path: str) -> TextIO:
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return Path(path).open(encoding="utf-8-sig")


def _of_lines(path: str, file: TextIO) -> Iterator[Arrival]:
    numbers, sessions = Numbers(), _Sessions()
    for number, line in enumerate(map(str.strip, file), 1):
        if line and line != "[]":
            yield _arrival(path, number, line, numbers, sessions)


def _of_table(path: str, file: TextIO) -> Iterator[Arrival]:
    rows, numbers = csv.DictReader(file), Numbers()
    columns = next((names for names in CSV_COLUMNS if set(names) <= set(rows.fieldnames or ())), None)
    if columns is None:
        known = ", or ".join(", ".join(names) for names in CSV_COLUMNS)
        raise ConfigError(f"--dataset-path {path}: must have the columns {known}")
    for number, row in enumerate(rows, 2):
        yield _checked(f"--dataset-path {path}, line {number}", partial(_of_row, row, columns, numbers))


def _of_row(row: dict[str, str], columns: tuple[str, str, str], numbers: Numbers) -> Arrival:
    counts = [row[name] or "" for name in columns[1:]]
    for name, count in zip(columns[1:], counts):
        if not count.isdecimal():
            raise ValueError(f"{name} is {count[:40]!r}; it must be a whole number")
    lengths = dict(zip(columns[1:], map(int, counts)))
    prompt, answer = _lengths(lengths, *columns[1:])
    moment = row[columns[0]] or ""
    try:
        seconds = float(moment)
    except ValueError:
        seconds = _date_seconds(columns[0], moment)
    seconds = _seconds({columns[0]: seconds}, columns[0])
    return Arrival(seconds, list(_unique(numbers, prompt)), answer)


def _date_seconds(name: str, text: str) -> float:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ValueError(f"{name} is {text[:40]!r}; it must be seconds, or a date and time") from None


class _Sessions:
    """The numbers of session ids, and the time of each one's last turn."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def place(self, entry: dict[str, Any], arrival: Arrival) -> Arrival:
        """Sets session and pause of a line's request, and, if it has no time of its own, the time of the previous
        turn."""
        session = entry.get("session_id")
        if session is not None and (isinstance(session, bool) or not isinstance(session, (int, str))):
            raise ValueError("session_id must be a string or an integer")
        before = self._seen.get(str(session)) if session is not None else None
        if before is None and "timestamp" not in entry:
            raise KeyError("timestamp")
        if before is not None and "delay" in entry:
            arrival.pause = _seconds(entry, "delay") / 1000
        if before is not None and "timestamp" not in entry:
            arrival.seconds = before[1] + (arrival.pause or 0.0)
        if session is not None:
            arrival.conversation = len(self._seen) if before is None else before[0]
            self._seen[str(session)] = arrival.conversation, arrival.seconds
        return arrival


def _arrival(path: str, number: int, line: str, numbers: Numbers, sessions: _Sessions) -> Arrival:
    where = f"--dataset-path {path}, line {number}"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        what = "a trace has an object in each line (JSONL), or is a .csv file"
        raise ConfigError(f"{where}: not JSON: {line[:60]!r}; {what}") from None
    if not isinstance(entry, dict):
        raise ConfigError(
            f"{where}: must be an object with timestamp, input_length and output_length, one in each line"
        )
    if "timestamp" in entry or "session_id" in entry:
        return _checked(where, lambda: sessions.place(entry, _mooncake(entry, numbers)))
    return _checked(where, lambda: _own(entry, numbers))


def _checked(where: str, read: Callable[[], T]) -> T:
    """What `read` returns. Raises ConfigError for its errors."""
    try:
        return read()
    except KeyError as error:
        raise ConfigError(f"{where}: {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _count(entry: dict[str, Any], name: str, least: int = 1, most: int = MOST_TOKENS) -> int:
    value = entry[name]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {repr(value)[:40]}; it must be an integer of at least {least}")
    if value > most:
        raise ValueError(f"{name} is {value:.3g}; it must be at most {most}")
    return value


def _lengths(entry: dict[str, Any], prompt: str, answer: str) -> tuple[int, int]:
    """Tokens of prompt and answer, by their names. A request without answer tokens may have no prompt either."""
    output = _count(entry, answer, 0)
    return _count(entry, prompt, min(output, 1)), output


def _seconds(entry: dict[str, Any], name: str) -> float:
    value = entry[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST_TIME:
        raise ValueError(f"{name} is {repr(value)[:40]}; it must be a number from 0 to {MOST_TIME:g}")
    return float(value)


def _mooncake(entry: dict[str, Any], numbers: Numbers) -> Arrival:
    length, answer = _lengths(entry, "input_length", "output_length")
    prompt: list[int] = []
    blocks = entry.get("hash_ids") or []
    if not isinstance(blocks, list) or not all(isinstance(block, int) and 0 <= block < 1 << 40 for block in blocks):
        raise ValueError("hash_ids must be a list of integers from 0")
    if len(blocks) > (needed := -(-length // MOONCAKE_BLOCK)):
        raise ValueError(
            f"hash_ids has {len(blocks)} entries, and a prompt of {length} tokens has {needed} blocks of "
            f"{MOONCAKE_BLOCK}; a trace with other blocks must be converted"
        )
    for block in blocks:
        first = BLOCKS_FROM + block * MOONCAKE_BLOCK
        prompt += range(first, first + MOONCAKE_BLOCK)
    del prompt[length:]
    prompt += _unique(numbers, length - len(prompt))
    seconds = _seconds(entry, "timestamp") / 1000 if "timestamp" in entry else 0.0
    return Arrival(seconds, prompt, answer)


def _own(entry: dict[str, Any], numbers: Numbers) -> Arrival:
    (length, answer), shared = _lengths(entry, "input_len", "output_len"), 0
    prompt: list[int] = []
    if entry.get("prefix_len"):
        shared = min(_count(entry, "prefix_len"), length)
        first = PREFIXES_FROM + (_count(entry, "prefix_id", 0, 1 << 40) << 32)
        prompt += range(first, first + shared)
    prompt += _unique(numbers, length - shared)
    allowed = _count(entry, "max_tokens") if "max_tokens" in entry else 0
    return Arrival(_seconds(entry, "arrival"), prompt, answer, allowed)


def _unique(numbers: Numbers, count: int) -> range:
    first = numbers.take(count)
    return range(first, first + count)
