"""The methods of a core that the frontend may call by name, with typed arguments. Methods of ranks are in
`worker.rank_methods`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from moe_engine.errors import InputError, MoeEngineError
from moe_engine.scheduler.run_settings import RunSettings


class NoArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of methods without any."""


@dataclass(frozen=True)
class CoreMethod:
    """`run` takes an instance of `args`; it returns a plain value, or a future of one."""

    run: Callable[[Any], Any]
    args: type[msgspec.Struct] = NoArgs

    def call(self, args: Mapping[str, Any]) -> Any:
        """Raises MoeEngineError: wrong arguments."""
        try:
            checked = msgspec.convert(args, self.args)
        except msgspec.ValidationError as error:
            raise MoeEngineError(f"wrong arguments: {error}") from None
        return self.run(checked)


NO_METHODS: Mapping[str, CoreMethod] = {}


class WriteArgs(msgspec.Struct, forbid_unknown_fields=True):
    """`parts`: records of the ranks of all cores, see `parallel.recording.merge`."""

    parts: list[Any]


class PauseArgs(msgspec.Struct, forbid_unknown_fields=True):
    """`retract`: running requests release their KV, and are recomputed later."""

    retract: bool = False


class SetArgs(msgspec.Struct, forbid_unknown_fields=True):
    """`changes`: value by setting. `check_only`: changes nothing."""

    changes: dict[str, Any]
    check_only: bool = False


def settings_methods(settings: RunSettings) -> dict[str, CoreMethod]:
    """set_settings: the values in force, or the reason why none has changed. settings: values and bounds."""

    def change(args: SetArgs) -> dict[str, Any]:
        try:
            return {"values": settings.set(args.changes, check_only=args.check_only)}
        except InputError as error:
            return {"refused": error.message}

    return {
        "set_settings": CoreMethod(change, SetArgs),
        "settings": CoreMethod(lambda _: {"values": settings.values(), "bounds": settings.bounds()}),
    }


class LoraId(msgspec.Struct, forbid_unknown_fields=True):
    lora_id: int


class NewWeights(msgspec.Struct, forbid_unknown_fields=True):
    """`weights`: a name not used for earlier weights."""

    weights: str


class ExpertDumps:
    """Writes dumps of expert counts into the operator's directory, on a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, "expert-dumps")

    def method(self) -> CoreMethod:
        """Returns the paths of the files written."""
        return CoreMethod(self._write, WriteArgs)

    def _write(self, args: WriteArgs) -> Future[list[str]]:
        return self._thread.submit(self._written, args.parts)

    def _written(self, parts: list[Any]) -> list[str]:
        from moe_engine.parallel.recording.merge import write_parts

        return [str(path) for path in write_parts(self._directory, parts)]
