"""The errors a user meets. Each names the field, flag or file at fault and how to mend it."""

from __future__ import annotations


class MoeEngineError(Exception):
    """Base of all errors raised on purpose by the engine."""


class InputError(MoeEngineError):
    """A request is wrong. Never affects other requests.

    Args:
        message: what is wrong and what to do, for the client.
        field: the request field at fault (``sampling_params.temperature``), or None.
        status: the HTTP status this becomes (400 for bad values, 404 for an unknown model, 503 for a full queue).
    """

    def __init__(self, message: str, *, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.status = status


class GenerationError(MoeEngineError):
    """The engine could not compute a request that was right (its logits were NaN); HTTP status 500."""


class ConfigError(MoeEngineError):
    """The launch configuration, a model config or a checkpoint is wrong; the message names flag or file and the fix."""


class NotAvailableYet(ConfigError):
    """A flag or field that users of SGLang know and that a later part of this engine will bring."""


class CheckpointError(ConfigError):
    """A tensor or file of a checkpoint is missing, truncated or of the wrong shape."""


class StepError(MoeEngineError):
    """A step failed; says which, where in it, and how much it was to compute. The cause is chained."""


class StepNotRun(StepError):
    """A step was planned behind a failed one, whose error has been raised before."""


class EngineDeadError(MoeEngineError):
    """A process of the engine is gone; names it. Running requests get this instead of silence."""
