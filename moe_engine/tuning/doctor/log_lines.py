"""One line of a server's log -> an event. Reads the formats of SGLang 0.4 to 0.5.23 and of this engine.

The prefix of a line has a time and the ranks: ``[2025-08-11 17:17:03 DP0 TP0]``. Container runtimes and log collectors
put times of their own before it; lines of old releases have a clock time only, and some logs have no times.
"""

from __future__ import annotations

import ast
import calendar
import json
import math
import re
import warnings
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal, NamedTuple

Kind = Literal[
    "prefill", "decode", "retraction", "startup", "server_args", "weights", "kv_cache", "balance", "late", "jit",
    "out_of_memory", "pool_room", "no_room_for_kv", "hang", "ready", "ledger",
]  # fmt: skip


class LogEvent(NamedTuple):
    """What a line reports. `time`: seconds, of which only differences matter; None: the line has no time. `rank`: the
    words of the rank in order (``DP1 TP4``). `values`: by kind, see `VALUES` and the functions below."""

    kind: Kind
    time: float | None
    rank: str
    values: dict[str, Any]


class BrokenLine(ValueError):
    """The line starts like a known line, and is cut off or damaged."""


VALUES = {
    "#running-req": "running",
    "#token": "tokens",
    "#full token": "tokens",
    "token usage": "usage",
    "full token usage": "kv_usage",
    "swa token usage": "swa_usage",
    "mamba usage": "mamba_usage",
    "#gpu token": "tokens",
    "gpu token usage": "kv_usage",
    "accept len": "accept_len",
    "accept rate": "accept_rate",
    "cuda graph": "cuda_graph",
    "cpu graph": "cuda_graph",
    "npu graph": "cuda_graph",
    "musa graph": "cuda_graph",
    "gen throughput (token/s)": "throughput",
    "input throughput (token/s)": "input_throughput",
    "#queue-req": "queue",
    "#new-seq": "new_seq",
    "#new-token": "new_token",
    "#cached-token": "cached_token",
    "#retracted-req": "retracted",
    "#pending-token": "pending_token",
    "pre-allocated usage": "preallocated",
    "#prealloc-req": "prealloc",
    "#inflight-req": "transfers",
    "#transferring-req": "transfers",
}
"""Value of a batch line by its name in the log."""
POOLS = ("usage", "kv_usage", "swa_usage", "mamba_usage")
"""If kinds of layers have pools of their own, `usage` is that of the fullest."""
WORDS = {"True": 1.0, "False": 0.0}
REQUIRED = {
    "decode": frozenset(("running", "usage", "queue")),
    "prefill": frozenset(("running", "usage", "queue", "new_token", "cached_token")),
}

_STAMP = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d"
_TAGS = r"((?: [A-Z][A-Z_]*\d+)*)"
_BRACKET = re.compile(rf"\[(?:({_STAMP})(?:[.,](\d+))?|(\d\d:\d\d:\d\d)){_TAGS}\]")
_ANY_STAMP = re.compile(rf"({_STAMP})(?:[.,](\d+))?(?:{_TAGS}\])?")
_RANK_BRACKET = re.compile(r"\[((?:DP|PP|TP)\d+(?: [A-Z][A-Z_]*\d+)*)[ \]]")
"""Rank in the bracket of a logging configuration that writes the time before it, and the place in the code in it."""
_SYSLOG = re.compile(r"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(\d{1,2}) (\d\d):(\d\d):(\d\d)\b")
_PREFIX_CHARS = 200
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colors of a terminal."""
_BAR = re.compile(r".*(?:it/s|s/it)\]", re.S)
"""A progress bar, which has no line break of its own."""
_TEXT_FIELDS = ("log", "message", "msg", "MESSAGE", "textPayload", "line")
_TIME_FIELDS = ("time", "timestamp", "@timestamp", "asctime", "ts")
"""Names in the JSON lines of Docker, journald, fluentd, clouds and logging libraries."""
LAST_TIME = 1e20
"""Billionths of a second, in the year 5138: a larger number in a JSON line is no time."""
_MONTHS = {name: number for number, name in enumerate(calendar.month_abbr) if name}

_NUMBER = r"(\d+(?:\.\d+)?)"
_USUAL_DECODE = re.compile(
    rf"\[({_STAMP}){_TAGS}\] Decode batch[.,] #running-req: {_NUMBER}, #token: {_NUMBER}, token usage: {_NUMBER}, "
    rf"(?:accept len: {_NUMBER}, )?cuda graph: (True|False), gen throughput \(token/s\): {_NUMBER}, "
    rf"#queue-req: {_NUMBER},?\s*\Z"
)
_USUAL_PREFILL = re.compile(
    rf"\[({_STAMP}){_TAGS}\] Prefill batch[.,] #new-seq: {_NUMBER}, #new-token: {_NUMBER}, #cached-token: {_NUMBER}, "
    rf"token usage: {_NUMBER}, #running-req: {_NUMBER}, #queue-req: {_NUMBER}(?:,\s*|, #pending-token: {_NUMBER}, "
    rf"cuda graph: (?:True|False), input throughput \(token/s\): {_NUMBER}\s*)\Z"
)
"""Nearly all lines of a log, in one match: several times as fast as reading name by name."""
_PREFILL_SERVER = "#unbootstrapped-req: "
"""In the lines of a prefill server of SGLang 0.4.7 to 0.5.3, which have no ``#running-req``."""
_PAIR = re.compile(r"([#A-Za-z][\w# -]*?(?: \([\w/ ]+\))?): ([^\s,\"'`\\]+)")
"""A value ends at a quotation mark too: exports write lines as quoted fields."""
_BATCH = re.compile(r"(Decode|Prefill) batch")
_CUT_OFF = re.compile(r"[.,]?\s*(?:\[\d*\]?,?\s*)?(?:#.*)?\s*", re.S)
_RETRACT = re.compile(
    r"(?:KV cache pool is full\. Retract requests|Decode out of memory happened)\. #retracted_reqs: (\d+)"
    r"(?:.*#new_token_ratio: ([\d.]+) -> ([\d.]+))?"
)
_STARTUP = re.compile(r"\b(\w+)=(-?[\d.]+)")
_BALANCE = re.compile(r"(\w+)_balancedness=([\d.]+)")
_WEIGHTS = re.compile(r"avail mem=([\d.]+) GB(?:, mem usage=([\d.]+) GB)?")
_KV = re.compile(r"(?:dtype: (?:torch\.)?(\w+), )?#tokens: (\d+), (.*)")
_SIZE = re.compile(r"size: ([\d.]+) GB")
_LATE = re.compile(r"(\S.*?) is late: (.*)")
_WHOLE_NUMBER = re.compile(r"-?\d+")
_JIT = ("after READY:", "DeepGEMM JIT", "Entering DeepGEMM JIT", "DeepGEMM warmup")
_OOM = ("out of memory", "OutOfMemoryError", "CUDA OOM")
_POOL_OOM = ("Prefill out of memory. Try", "Decode out of memory. Try", "smaller number for `--max-running-requests`")
"""The KV cache, and not the GPU's memory, has no room for a step."""
_POOL_ROOM = re.compile(r"Available (full|swa)(?: tokens)?: (\d+)")
_NOT_OF_THE_GPU = ("Killed process", "cgroup out of memory")
"""The kernel's words for a lack of host memory."""
_HANGS = (
    "atchdog timeout (self.watchdog_timeout", "Watchdog caught collective operation timeout", "stalled: step ",
    "stalled: no heartbeat",
)  # fmt: skip
_REQUESTS = ("Receive: obj=", "Finish: obj=", '"request.received"', '"request.finished"')
"""Lines of --log-requests: prompts and answers may contain any text."""
_NO_ROOM = "Not enough memory. Please try to increase --mem-fraction-static"
START_WORDS = (
    "Capture cuda graph failed",
    "init_cuda_graphs",
    "init_device_graphs",
    "cuda_graph_setup.py",
    "init_memory_pool",
)
"""Texts of errors at the start, after the weights were loaded."""
FOREIGN = {
    "Avg generation throughput: ": "vLLM",
    "(EngineCore": "vLLM",
    "vLLM API server version": "vLLM",
    "[TRT-LLM]": "TensorRT-LLM",
    "text_generation_launcher": "TGI",
    "llama_model_loader: ": "llama.cpp",
}
"""Words of other engines' lines."""
PREFILL_WORDS = ("prefill", "Prefill", "forward_extend", "alloc_for_extend", "alloc_token_slots")
DECODE_WORDS = ("decode", "Decode", "alloc_for_decode")


def parse(line: str) -> LogEvent | None:
    """The event of a line; None for lines without facts that the rules use.

    Raises:
        BrokenLine: cut off or damaged.
    """
    if (usual := _USUAL_DECODE.match(line)) is not None:
        return _usual_decode(usual)
    if (usual := _USUAL_PREFILL.match(line)) is not None:
        return _usual_prefill(usual)
    if (found := _BATCH.search(line)) is not None and ("#running-req" in line or _PREFILL_SERVER in line):
        return _batch(line, found)
    if found is not None and _CUT_OFF.fullmatch(line, found.end()):
        raise BrokenLine("values are missing")
    if any(words in line for words in _REQUESTS):
        return None
    try:
        return _other(line)
    except ValueError as error:
        raise BrokenLine(str(error)) from None


def unwrapped(line: str) -> str:
    """The server's line, without colors, a progress bar before it and the JSON object around it; a line without these
    as it is."""
    if "\x1b" in line:
        line = ESCAPES.sub("", line)
    if "it/s]" in line or "s/it]" in line:
        line = _BAR.sub("", line)
    if (start := line.find('{"')) < 0:
        return line
    try:
        found, _ = json.JSONDecoder().raw_decode(line, start)
    except (ValueError, RecursionError):
        return line
    inner = (part for part in found.values() if isinstance(part, dict))
    found = {**{name: value for part in inner for name, value in part.items()}, **found}
    text = next((found[name] for name in _TEXT_FIELDS if isinstance(found.get(name), str)), None)
    if text is None:
        return line
    text = unwrapped(text)
    moment = next((_date(found[name]) for name in _TIME_FIELDS if isinstance(found.get(name), str | float | int)), "")
    return text if _prefix(text)[0] is not None else f"{moment} {text}"


def _date(value: str | float) -> str:
    """A time of a JSON line as a date; numbers are seconds since 1970, or thousandths, millionths or billionths."""
    if isinstance(value, str):
        return value
    if not 0 <= value <= LAST_TIME:
        return ""
    while value >= 1e11:
        value /= 1000
    return datetime.fromtimestamp(value, UTC).isoformat()


def split_glued(line: str) -> list[str]:
    """Splits lines of several processes that were written without line breaks between them."""
    starts = [found.start() for found in _BRACKET.finditer(line)]
    return [line[start:end] for start, end in zip([0, *starts[1:]], [*starts[1:], len(line)])]


def _usual_decode(found: re.Match[str]) -> LogEvent:
    stamp, rank, running, tokens, usage, accept_len, graph, throughput, queue = found.groups()
    values = {
        "running": float(running),
        "tokens": float(tokens),
        "usage": float(usage),
        "cuda_graph": WORDS[graph],
        "throughput": float(throughput),
        "queue": float(queue),
    }
    if accept_len is not None:
        values["accept_len"] = float(accept_len)
    return LogEvent("decode", _seconds(stamp), rank.strip(), values)


def _usual_prefill(found: re.Match[str]) -> LogEvent:
    names = "new_seq", "new_token", "cached_token", "usage", "running", "queue"
    values = {name: float(text) for name, text in zip(names, found.groups()[2:8])}
    return LogEvent("prefill", _seconds(found[1]), found[2].strip(), values)


def _batch(line: str, found: re.Match[str]) -> LogEvent:
    kind: Kind = "decode" if found[1] == "Decode" else "prefill"
    values: dict[str, Any] = {}
    for name, text in _PAIR.findall(line, found.end()):
        if (key := VALUES.get(name)) is None:
            continue
        try:
            value = WORDS[text] if text in WORDS else float(text)
        except ValueError:
            raise BrokenLine(f"{name}: {text}") from None
        if not 0.0 <= value < math.inf:
            raise BrokenLine(f"{name}: {text}")
        values[key] = max(value, values.get(key, 0.0))
    if pools := [values[name] for name in POOLS if name in values]:
        values["usage"] = max(pools)
    if _PREFILL_SERVER in line:
        values.setdefault("running", 0.0)
    if not REQUIRED[kind] <= values.keys():
        raise BrokenLine("values are missing")
    moment, rank = _prefix(line)
    return LogEvent(kind, moment, rank, values)


def _other(line: str) -> LogEvent | None:
    kind: Kind
    values: dict[str, Any]
    if "#retracted_reqs" in line and (found := _RETRACT.search(line)):
        ratio = {"ratio": float(found[3].rstrip("."))} if found[3] else {}
        kind, values = "retraction", {"retracted": int(found[1]), **ratio}
    elif "max_total_num_tokens=" in line and "server_args=" not in line:
        kind, values = "startup", _startup(line[line.index("max_total_num_tokens=") :])
    elif "server_args=" in line:
        kind, values = "server_args", server_args(line[line.index("server_args=") + len("server_args=") :])
    elif "Load weight" in line and (found := _WEIGHTS.search(line)):
        kind, values = "weights", {"available": float(found[1]), "used": float(found[2]) if found[2] else None}
    elif "KV Cache is allocated" in line and (found := _KV.search(line)):
        size = sum(map(float, _SIZE.findall(found[3])))
        kind, values = "kv_cache", {"dtype": found[1], "tokens": int(found[2]), "gb": size}
    elif "_balancedness=" in line:
        kind, values = "balance", {name: float(value) for name, value in _BALANCE.findall(line)}
    elif " is late: " in line and (found := _LATE.search(line.rpartition("] ")[2])):
        kind, values = "late", {"rank": found[1], "where": found[2].strip()}
    elif _NO_ROOM in line:
        kind, values = "no_room_for_kv", {}
    elif any(words in line for words in _HANGS):
        kind, values = "hang", {}
    elif "Decode out of memory happened" in line:
        raise BrokenLine("values are missing")
    elif any(words in line for words in _POOL_OOM):
        kind, values = "out_of_memory", {"phase": "pool"}
    elif "Available " in line and (found := _POOL_ROOM.search(line)):
        kind, values = "pool_room", {found[1]: int(found[2])}
    elif any(word in line for word in _OOM) and not any(words in line for words in _NOT_OF_THE_GPU):
        kind, values = "out_of_memory", {"phase": phase_of(line)}
    elif "fired up and ready to roll" in line:
        kind, values = "ready", {}
    elif any(word in line for word in _JIT):
        kind, values = "jit", {}
    elif "Memory ledger: " in line:
        kind, values = "ledger", {}
    else:
        return None
    moment, rank = _prefix(line)
    return LogEvent(kind, moment, rank, values)


def phase_of(line: str) -> str | None:
    """``start``, ``prefill`` or ``decode``, by the names of functions and words in a line of a traceback; None: none
    of them."""
    if any(word in line for word in START_WORDS):
        return "start"
    if any(word in line for word in PREFILL_WORDS):
        return "prefill"
    return "decode" if any(word in line for word in DECODE_WORDS) else None


def _startup(line: str) -> dict[str, Any]:
    return {name: int(text) if _WHOLE_NUMBER.fullmatch(text) else float(text) for name, text in _STARTUP.findall(line)}


def server_args(text: str) -> dict[str, Any]:
    """The flags of ``ServerArgs(name=value, ...)`` or of a JSON-like dict, up to the last bracket; values that are not
    literals are left out.

    Raises:
        BrokenLine: cut off.
    """
    whole = text[: max(text.rfind(")"), text.rfind("}")) + 1].strip()
    try:
        with warnings.catch_warnings(action="ignore"):  # about spellings inside of the values
            tree = ast.parse(whole, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise BrokenLine("server_args cannot be read") from None
    if isinstance(tree, ast.Call):
        pairs: list[tuple[str | None, ast.expr]] = [(word.arg, word.value) for word in tree.keywords]
    elif isinstance(tree, ast.Dict):
        pairs = [(_literal(key), value) for key, value in zip(tree.keys, tree.values) if key is not None]
    else:
        raise BrokenLine("server_args cannot be read")
    return {name: _literal(value) for name, value in pairs if isinstance(name, str)}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _prefix(line: str) -> tuple[float | None, str]:
    """Time, of the first bracket, and ranks, of the last: log collectors put brackets of their own before the
    server's."""
    head = line[:_PREFIX_CHARS]
    if brackets := _BRACKET.findall(head):
        stamp, fraction, clock, _ = brackets[0]
        moment = _seconds(stamp) if stamp else _clock_seconds(clock)
        return (moment + float(f"0.{fraction}") if fraction and moment is not None else moment), brackets[-1][3].strip()
    if (found := _ANY_STAMP.search(head)) is not None:
        moment = _seconds(found[1])
        ranks = None if found[3] else _RANK_BRACKET.search(head, found.end())
        tags = ranks[1] if ranks else (found[3] or "").strip()
        return (moment + float(f"0.{found[2]}") if found[2] and moment is not None else moment), tags
    if (found := _SYSLOG.search(head)) is not None:
        day = _MONTHS[found[1]] * 31 + int(found[2])
        return day * 86400.0 + int(found[3]) * 3600 + int(found[4]) * 60 + int(found[5]), ""
    return None, ""


@lru_cache(1024)
def _seconds(stamp: str) -> float | None:
    try:
        return datetime.fromisoformat(stamp).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


@lru_cache(1024)
def _clock_seconds(clock: str) -> float:
    hours, minutes, seconds = map(int, clock.split(":"))
    return hours * 3600.0 + minutes * 60 + seconds
