"""Request log (`--log-requests`): a line per received request and one per finished request, to log, output or files."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from io import TextIOWrapper
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path
from typing import Any

import msgspec

from moe_engine.config.logging import LoggingArgs
from moe_engine.custom_logit_processor import described
from moe_engine.errors import ConfigError
from moe_engine.frontend.frontend import Observer
from moe_engine.frontend.generation import Generation
from moe_engine.logs import DATE_FORMAT
from moe_engine.processes.unblocked_stream import unblocked
from moe_engine.server.request_ids import request_id
from moe_engine.types import SamplingParams

logger = logging.getLogger("moe_engine.server")

PARTIAL_CHARS = 2048
STDOUT = "stdout"


@dataclass(frozen=True)
class RequestLogSettings:
    """
    Attributes:
        level: SGLang's. 0 metadata, 1 plus sampling parameters, 2 plus the beginning of the texts, 3 everything.
        as_json: a JSON object a line, with SGLang's names of the events.
        targets: stdout, or folders with a file for each hour; empty: the server's log.
    """

    level: int = 2
    as_json: bool = False
    targets: tuple[str, ...] = ()

    @classmethod
    def of(cls, flags: LoggingArgs) -> RequestLogSettings:
        return cls(
            flags.log_requests_level, flags.log_requests_format == "json", tuple(flags.log_requests_target.split())
        )


class _Dropping(logging.Handler):
    """Drops lines that cannot be written, as on a full disk: one line of the server's log at the first, and one when
    lines can be written again. Without it, logging prints a traceback for each line."""

    target = STDOUT
    _num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        before = self._num_dropped
        super().emit(record)
        if before and self._num_dropped == before:
            self._num_dropped = 0
            logger.warning("--log-requests-target %s: written again, %d lines are missing", self.target, before)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._num_dropped += 1
        if self._num_dropped == 1:
            reason = error.strerror or error
            message = "--log-requests-target %s: cannot be written (%s): lines are dropped until it can; free its disk"
            logger.error(message, self.target, reason)


class _Output(_Dropping, logging.StreamHandler):  # type: ignore[type-arg]  # typeshed's alone is generic
    pass


class _HourFiles(_Dropping, TimedRotatingFileHandler):
    """A file for each hour in a folder."""

    def __init__(self, folder: str) -> None:
        self.target = folder
        super().__init__(Path(folder) / f"{socket.gethostname()}.log", when="H", encoding="utf-8")

    def rotation_filename(self, default_name: str) -> str:
        """A new name. The class's own may belong to lines of another server with the same folder, or of the same hour
        before the clock was set back, and would replace them."""
        name = super().rotation_filename(default_name)
        names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(1)))
        return next(name for name in names if not os.path.exists(name))

    def _open(self) -> TextIOWrapper:
        """Ends the last line if a full disk or a kill has cut it: the next one would be its continuation."""
        stream = super()._open()
        if os.path.isfile(self.baseFilename) and (size := os.path.getsize(self.baseFilename)):
            with suppress(OSError), open(self.baseFilename, "rb") as file:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    stream.write("\n")
        return stream

    def handleError(self, record: logging.LogRecord) -> None:
        super().handleError(record)
        # The next line opens the file again, without the rest of this one.
        stream, self.stream = self.stream, None  # type: ignore[assignment]  # as the class itself does in close()
        with suppress(OSError):
            if stream is not None:
                stream.close()


class RequestLog(Observer):
    """Raises ConfigError: a folder of the targets cannot be written."""

    def __init__(self, settings: RequestLogSettings) -> None:
        self._level = settings.level
        self._as_json = settings.as_json
        self._loggers = [_logger(target) for target in settings.targets] or [logger]

    def received(self, generation: Generation) -> None:
        facts: dict[str, Any] = {"rid": generation.rid, "prompt_tokens": len(generation.prompt_ids)}
        if outer := request_id.get():
            facts["x_request_id"] = outer
        if self._level >= 1:
            facts["sampling_params"] = _parameters(generation.sampling)
        if self._level >= 2:
            facts["text"] = self._cut(generation.prompt_text)
        self._write("Receive", "request.received", facts)

    def finished(self, generation: Generation) -> None:
        facts: dict[str, Any] = {"rid": generation.rid, "meta_info": generation.meta_info()}
        if self._level >= 2:
            facts["text"] = self._cut(generation.text)
        self._write("Finish", "request.finished", facts)

    def _write(self, word: str, event: str, facts: dict[str, Any]) -> None:
        if self._as_json:
            line = {"timestamp": datetime.now().isoformat(), "event": event} | facts
            text = msgspec.json.encode(line, enc_hook=str).decode()
        else:
            text = f"{word}: {facts}"
        for target in self._loggers:
            target.info("%s", text)

    def _cut(self, text: str | None) -> str | None:
        if text is None or self._level >= 3 or len(text) <= PARTIAL_CHARS:
            return text
        return text[:PARTIAL_CHARS] + " ..."


def with_request_log(observers: Iterable[Observer], settings: RequestLogSettings | None) -> tuple[Observer, ...]:
    """The same observers with a request log of these settings instead of the previous one; None: without one."""
    rest = [observer for observer in observers if not isinstance(observer, RequestLog)]
    return (*rest, RequestLog(settings)) if settings is not None else tuple(rest)


def _logger(target: str) -> logging.Logger:
    """A logger that writes plain lines to standard output or to a folder."""
    found = logging.getLogger(f"moe_engine.requests.{target.replace('.', '_')}")
    if found.handlers:
        return found
    handler: logging.Handler = _Output(unblocked(sys.stdout)) if target == STDOUT else _file_handler(target)
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", datefmt=DATE_FORMAT))
    found.addHandler(handler)
    found.setLevel(logging.INFO)
    found.propagate = False
    return found


def _file_handler(folder: str) -> logging.Handler:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return _HourFiles(folder)
    except OSError as error:
        reason = "it is a file; name a folder" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(f"--log-requests-target {folder}: cannot be written: {reason}") from None


def _parameters(sampling: SamplingParams) -> dict[str, Any]:
    """The serialized class of a custom logit processor is replaced by its name and size."""
    found: dict[str, Any] = msgspec.to_builtins(sampling)
    if sampling.custom_logit_processor is not None:
        found["custom_logit_processor"] = described(sampling.custom_logit_processor)
    return found
