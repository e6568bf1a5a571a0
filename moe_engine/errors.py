"""User-facing errors. Each message names the field, flag or file at fault and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

LFS_POINTER = b"version https://git-lfs"
"""Begin of the files that Git LFS leaves where the contents were not downloaded."""
LFS_FIX = "is a pointer of Git LFS, the content is not downloaded; run `git lfs pull` in its folder"


class MoeEngineError(Exception):
    """Base of the engine's own errors."""


class InputError(MoeEngineError):
    """A request is invalid. Never affects other requests.

    Args:
        message: the problem and the fix, for the client.
        field: the request field at fault (``sampling_params.temperature``), or None.
        status: the HTTP status this becomes (400 for bad values, 404 for an unknown model, 503 for a full queue).
    """

    def __init__(self, message: str, *, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.status = status

    @classmethod
    def at(cls, field: str, problem: str, *, status: int = 400) -> InputError:
        """An error whose message begins with the field."""
        return cls(f"{field}: {problem}", field=field, status=status)


class TooLongError(InputError):
    """A prompt, or a prompt with the tokens asked for, is longer than the context or the KV cache."""


class GenerationError(MoeEngineError):
    """A valid request could not be computed (its logits were NaN); HTTP status 500."""


class ConfigError(MoeEngineError):
    """The launch configuration, a model config or a checkpoint is invalid; names the flag or file, and the fix."""


class NotAvailableYet(ConfigError):
    """A flag or field of SGLang that this engine does not implement yet."""


class CheckpointError(ConfigError):
    """A tensor or file of a checkpoint is missing, truncated or of the wrong shape."""


class StepError(MoeEngineError):
    """A step failed. The message gives its number, the stage that failed and the step's size. The cause is chained."""


class StepNotRun(StepError):
    """A step planned after a failed one was skipped; the failed step's error has been raised before."""


class EngineDeadError(MoeEngineError):
    """A process of the engine died; the message names it. Running requests get this error instead of hanging."""


class RankLostError(EngineDeadError):
    """A data-parallel rank was lost, and others serve; the message names both and says what to do."""


def nearest(word: str, known: Sequence[str], cutoff: float = 0.75) -> str | None:
    """The known word that is most similar to `word`, or None below the cutoff. A flag's dashes do not count."""
    spellings = {text.lstrip("-"): text for text in known}
    close = difflib.get_close_matches(word.lstrip("-"), spellings, n=1, cutoff=cutoff)
    return spellings[close[0]] if close else None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """`` (did you mean X?)`` or nothing. All `known` words must be accepted."""
    close = nearest(word, known, cutoff=0.6)
    return f" (did you mean {close}?)" if close else ""
