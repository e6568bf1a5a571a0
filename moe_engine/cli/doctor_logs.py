"""``moe-engine doctor --log FILE`` and ``--url URL``: the rules of the tuning guides on a log or a running server."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import math
import os
import sys
import time
import zlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, BinaryIO

from tqdm import tqdm

from moe_engine.errors import ConfigError
from moe_engine.tuning.doctor.diagnosis import Diagnosis
from moe_engine.tuning.doctor.launch import Launch
from moe_engine.tuning.doctor.live import LiveServer, launch_of, sample
from moe_engine.tuning.doctor.log_reader import LogReader, progress_lines
from moe_engine.tuning.doctor.memory_costs import ReportedCosts
from moe_engine.tuning.doctor.report import MAX_LINE, Report, make_report, text_of
from moe_engine.tuning.doctor.window import Window, printable

WINDOW_SECONDS = 300.0
SAMPLE_SECONDS = 15.0
FOLLOW_SECONDS = 0.5
SHOW_SECONDS = 5.0
GZIP = b"\x1f\x8b"


def run(options: Namespace) -> int:
    """The command with --log or --url. Returns 0 if no rule recommends a change, else 1.

    Raises:
        ConfigError: the log or the server cannot be read, or options contradict each other.
    """
    _check(options)
    window = WINDOW_SECONDS if options.window is None else options.window
    if options.url is not None:
        return _of_server(options, window)
    if options.follow:
        return _follow(options.log, window)
    report = _of_log(options.log, window)
    _show(report, options.json)
    return report.exit_code


def _check(options: Namespace) -> None:
    if options.url is not None and options.log is not None:
        raise ConfigError("--url and --log: give one of the two")
    if options.window is not None and not options.window >= 0:
        raise ConfigError(f"--window {options.window:g}: must be seconds, or 0 for the whole log")
    if options.url is not None and options.window == 0:
        raise ConfigError("--window 0: only a log has a begin; with --url give the last seconds, above 0")
    if options.sample_seconds is not None and not 0 < options.sample_seconds < math.inf:
        raise ConfigError(f"--sample-seconds {options.sample_seconds:g}: must be a number of seconds above 0")
    if options.follow and (options.log is None or options.log == "-" or options.json):
        raise ConfigError("--follow belongs to --log FILE, without --json; a pipe is followed until it ends anyway")
    for option, value in (("--api-key", options.api_key), ("--sample-seconds", options.sample_seconds)):
        if value is not None and options.url is None:
            raise ConfigError(f"{option} belongs to --url: add that, or drop {option}")


def _show(report: Report, as_json: bool) -> None:
    print(json.dumps(report.as_json(), indent=2) if as_json else report.as_text())


# -- logs


def _of_log(path: str, window: float) -> Report:
    reader = _reader(window)
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size if path != "-" else 0
        with tqdm(total=size or None, unit="B", unit_scale=True, desc="Reading", disable=_no_bar(), leave=False) as bar:
            try:
                reader.read(progress_lines(file, bar.update))
            except (OSError, EOFError, zlib.error) as error:  # a rotated log that is still being compressed
                print(f"--log {path}: line {reader.num_lines} is the last that can be read ({error})", file=sys.stderr)
    reader.finish()
    return _report(path, reader)


def _reader(window: float) -> LogReader:
    launch = Launch()
    return LogReader(Diagnosis(ReportedCosts(launch)), window, launch)


def _report(path: str, reader: LogReader) -> Report:
    source = "standard input" if path == "-" else path
    report = make_report(
        source,
        reader.launch.engine,
        reader.diagnosis,
        has_flags=bool(reader.launch.flags),
        num_lines=reader.num_lines,
        num_batches=reader.num_batches,
        num_broken=reader.num_broken,
    )
    if reader.foreign and not reader.num_batches and not reader.launch.flags:
        raise ConfigError(
            f"--log {path}: a log of {reader.foreign}, in a format that is not known; give one of SGLang or this engine"
        )
    if not reader.num_batches and not report.findings:
        broken = f" ({reader.num_broken} are cut off)" if reader.num_broken else ""
        error = ""
        if reader.last_error is not None:
            number, text = reader.last_error
            error = f"; the last error is in line {number}, and no rule is about it: {printable(text)[:MAX_LINE]}"
        raise ConfigError(
            f"--log {path}: {reader.num_lines} lines, and no 'Decode batch' or 'Prefill batch' line among them{broken};"
            " give the output of the server itself (SGLang's or this engine's), at --log-level info, with some requests"
            f"{error}"
        )
    return report


def _open(path: str) -> BinaryIO:
    """The log in UTF-8, also where the file is compressed, whatever its name is, or begins with UTF-16's byte-order
    mark, as PowerShell's ``>`` writes it."""
    try:
        file: Any = io.BufferedReader(sys.stdin.buffer if path == "-" else io.FileIO(path))  # type: ignore[type-var]
        if file.peek(2)[:2] == GZIP:
            file = gzip.GzipFile(fileobj=file)
        if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return codecs.EncodedFile(file, "utf-8", "utf-16", "replace")  # type: ignore[return-value]
        return file
    except FileNotFoundError:
        raise ConfigError(
            f"--log {path}: no such file; give the file with the server's output, or - for standard input"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--log {path}: cannot be read ({why}); give a file with a log") from None


def _no_bar() -> bool:
    return not sys.stderr.isatty()


def _follow(path: str, window: float) -> int:
    """Prints each rule when it first holds in a window, until Ctrl-C."""
    reader = _reader(window)
    shown: set[str] = set()
    last = time.monotonic()
    try:
        for line in _growing(path):
            if line is not None:
                reader.line(line)
            if time.monotonic() - last > SHOW_SECONDS or line is None:
                last = time.monotonic()
                _show_new(reader, shown)
    except KeyboardInterrupt:
        reader.finish()
        _show(_report(path, reader), as_json=False)
    return int(bool(shown))


def _show_new(reader: LogReader, shown: set[str]) -> None:
    for finding in reader.current().findings():
        if finding.name not in shown:
            shown.add(finding.name)
            print("\n".join(text_of(finding)), end="\n\n", flush=True)


def _growing(path: str) -> Iterator[str | None]:
    """Lines of a file that is still written, also after it was rotated or cut; None whenever its end is reached."""
    file, rest = _open(path), b""
    if isinstance(file, gzip.GzipFile):
        raise ConfigError("--follow: a compressed log does not grow; leave it out")
    while True:
        if raw := file.readline():
            rest += raw
            if rest.endswith(b"\n"):
                yield rest.decode("utf-8", "replace")
                rest = b""
            continue
        yield None
        time.sleep(FOLLOW_SECONDS)
        try:
            now = os.stat(path)
        except OSError:  # between two files of a rotation
            continue
        if now.st_ino != os.fstat(file.fileno()).st_ino:
            file.close()
            file, rest = _open(path), b""
        elif now.st_size < file.tell():
            file.seek(0, io.SEEK_SET)


# -- servers


def _of_server(options: Namespace, window: float) -> int:
    server = LiveServer(options.url, options.api_key)
    try:
        info = server.server_info()
        if launch_of(info).is_ours and (found := server.doctor(window / 60)) is not None:
            print(json.dumps(found, indent=2) if options.json else found["text"])
            return int(not found["healthy"])
        report = _sampled(server, SAMPLE_SECONDS if options.sample_seconds is None else options.sample_seconds)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--url {options.url}: an answer has fields that are not SGLang's or moe-engine's ({error!r}); give the "
            "server's own address, or --log FILE"
        ) from error
    finally:
        server.close()
    _show(report, options.json)
    return report.exit_code


def _sampled(server: LiveServer, seconds: float) -> Report:
    launch, events = sample(server, seconds)
    diagnosis, window = Diagnosis(ReportedCosts(launch)), Window(launch, of_log=False)
    total = max(1, round(seconds))
    with tqdm(total=total, unit="s", desc="Sampling", disable=_no_bar(), leave=False) as bar:
        began = time.monotonic()
        for event in events:
            window.add(event)
            bar.update(min(total, int(time.monotonic() - began)) - bar.n)
    diagnosis.add(window.statistics())
    return make_report(server.url, launch.engine, diagnosis, num_batches=window.num_decode)
