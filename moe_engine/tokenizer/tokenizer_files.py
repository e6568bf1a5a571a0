"""Files of a checkpoint's tokenizer, checked in milliseconds before any process starts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from moe_engine.errors import LFS_FIX, LFS_POINTER, ConfigError
from moe_engine.gguf_container import find_gguf

FIX = (
    "copy the model's tokenizer.json there, name another folder with --tokenizer-path, or serve token ids with "
    "--skip-tokenizer-init"
)
CONVERTIBLE = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "tekken.json", "tokenization_*.py", "*.tokenizer")
"""Files of other formats, which transformers may convert, and code of the checkpoint that reads a format of its own."""


class _Model(msgspec.Struct):
    """The field of tokenizer.json that every tokenizer has; the rest is only checked to be JSON."""

    model: dict[str, msgspec.Raw]


def check_tokenizer(path: str | Path, mode: str = "auto") -> None:
    """Refuses a folder without a tokenizer, and a truncated tokenizer.json. Names of the hub are not checked.

    Raises:
        ConfigError: names the file or folder, and what would work.
    """
    folder = Path(path)
    if find_gguf(folder) is not None or not folder.exists():
        return
    file = folder if folder.is_file() else folder / "tokenizer.json"
    if file.is_file() and mode == "auto":
        try:
            content = file.read_bytes()
            if content.startswith(LFS_POINTER):
                raise ConfigError(f"{file}: {LFS_FIX}")
            msgspec.json.decode(content, type=_Model)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{file}: cannot be read as a tokenizer.json: {error}; {FIX}") from None
    elif not file.is_file() and not any(next(folder.glob(pattern), None) for pattern in CONVERTIBLE):
        raise ConfigError(f"{folder}: has no tokenizer.json; {FIX}")
