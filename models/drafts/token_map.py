"""Token maps: the frequent tokens to which drafts are restricted (FR-Spec, arXiv 2502.14856). Imports no torch.

A file of ``torch.save`` with the token ids, as a list or an integer tensor.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models.checkpoint.torch_file import StoredTensor, read_object

FLAG = "--speculative-token-map"
_INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2"}


def read_token_map(path: str | Path, vocab_size: int) -> np.ndarray:
    """The token ids [W] int64, ascending, each once.

    Raises:
        ConfigError: no such file, another content, or ids outside the vocabulary.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{FLAG} {path}: no such file; give a file of torch.save with token ids")
    try:
        saved, storages = read_object(file)
    except CheckpointError as error:
        raise ConfigError(f"{FLAG} {error}") from None
    ids = np.unique(_numbers(file, saved, storages))
    if not len(ids):
        raise ConfigError(f"{FLAG} {path}: has no token ids")
    if ids[0] < 0 or ids[-1] >= vocab_size:
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise ConfigError(f"{FLAG} {path}: token {wrong} is outside the model's vocabulary of {vocab_size} tokens")
    return ids


def _numbers(file: Path, saved: object, storages: dict[str, range]) -> np.ndarray:
    if isinstance(saved, list | tuple) and all(type(value) is int for value in saved):
        return np.array(saved, dtype=np.int64)
    if isinstance(saved, StoredTensor) and saved.storage.dtype in _INTEGERS and len(saved.shape) == 1:
        kind, storage = np.dtype(_INTEGERS[saved.storage.dtype]), storages.get(saved.storage.key, range(0))
        start = storage.start + saved.offset * kind.itemsize
        if start + saved.shape[0] * kind.itemsize > storage.stop:
            raise ConfigError(f"{FLAG} {file}: the storage of its tensor is too small; save it again")
        return np.fromfile(file, kind, saved.shape[0], offset=start).astype(np.int64)
    raise ConfigError(f"{FLAG} {file}: must have token ids, as a list or a tensor of integers of one dimension")
