"""Custom logit processors: code of a client that changes a request's logits before sampling, in SGLang's form.

A client subclasses `CustomLogitProcessor`, and sends `to_str()` of the class as `custom_logit_processor` of a request
and its arguments as `custom_params` in the sampling parameters. The server runs the code, so it accepts such requests
with `--enable-custom-logit-processor` only. The class is serialized with dill, as SGLang does: also a class of the
client's script. Classes made for SGLang's base class are accepted. Imports no torch.
"""

from __future__ import annotations

import io
import json
import pickletools
from abc import ABC, abstractmethod
from functools import lru_cache
from itertools import islice
from typing import Any

SGLANG_MODULE = "sglang.srt.sampling.custom_logit_processor"
NO_DILL = "custom logit processors need the package dill; install it: pip install dill"
MAX_CACHED = 64
"""Loaded classes that are kept."""
_FIRST_OPS = 40
_TEXT_OPS = ("SHORT_BINUNICODE", "BINUNICODE", "GLOBAL")


class CustomLogitProcessor(ABC):
    """Base class. The server makes one instance per request and rank, without arguments."""

    @abstractmethod
    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]] | None = None) -> Any:
        """Returns the logits to sample from.

        Args:
            logits: tensor [rows, vocabulary] float32 of one request: a row, or one for each draft position. May be
                changed in place.
            custom_param_list: `custom_params` for each row, and under ``__req__`` an object with `rid`,
                `origin_input_ids` and `output_ids`: the tokens before that row, drafts included.
        """

    @classmethod
    def to_str(cls) -> str:
        """The class, serialized for `custom_logit_processor`."""
        return json.dumps({"callable": _dill().dumps(cls).hex()})

    @classmethod
    def from_str(cls, text: str) -> CustomLogitProcessor:
        """An instance of a serialized class. Executes code of the sender.

        Raises:
            ValueError: the text is not a serialized class, or loading it failed.
        """
        return load(text)()


class DisallowedTokensLogitsProcessor(CustomLogitProcessor):
    """Forbids the tokens `custom_params["token_ids"]`."""

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]] | None = None) -> Any:
        for row, params in enumerate(custom_param_list or ()):
            logits[row, params["token_ids"]] = -float("inf")
        return logits


def pickled_bytes(text: str) -> bytes:
    """The pickled class in a serialized processor; executes nothing.

    Raises:
        ValueError: the text has another form.
    """
    try:
        return bytes.fromhex(json.loads(text)["callable"])
    except (ValueError, TypeError, KeyError):
        raise ValueError('expected CustomLogitProcessor.to_str(): {"callable": "<hexadecimal>"}') from None


def described(text: str) -> str:
    """Class name and size of a serialized processor, for logs; executes nothing."""
    size = f"{len(text)} characters"
    try:
        ops = pickletools.genops(pickled_bytes(text))
        found = [str(arg) for op, arg, _ in islice(ops, _FIRST_OPS) if op.name in _TEXT_OPS]
    except Exception:  # any bytes of a client
        return size
    if found[:2] == ["dill._dill", "_create_type"]:  # a class stored with its code: its metaclass, its name
        found = found[4:5]
    elif found and " " in found[0]:  # module and name in one operation
        found = [found[0].rpartition(" ")[2]]
    else:
        found = found[1:2]
    return f"{found[0]:.100} ({size})" if found else size


@lru_cache(MAX_CACHED)
def load(text: str) -> type[CustomLogitProcessor]:
    """The class in a serialized processor. Executes code of the sender.

    Raises:
        ValueError: the text is not a serialized class, or loading it failed.
    """
    data, dill = pickled_bytes(text), _dill()

    class Loader(dill.Unpickler):  # type: ignore[misc, name-defined]
        def find_class(self, module: str, name: str) -> Any:
            return super().find_class(__name__ if module == SGLANG_MODULE else module, name)

    try:
        loaded = Loader(io.BytesIO(data)).load()
    except Exception as error:
        raise ValueError(f"the class could not be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, type) or not callable(getattr(loaded, "__call__", None)):  # noqa: B004
        raise ValueError(f"expected a subclass of CustomLogitProcessor, got {type(loaded).__name__}")
    return loaded


def _dill() -> Any:
    try:
        import dill
    except ImportError:
        raise ValueError(NO_DILL) from None
    return dill
