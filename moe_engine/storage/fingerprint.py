"""Fingerprints of weights: equal for equal files, without reading all of them.

It covers the name and size of each file of weights, and 16 blocks of 4 KiB spread over it, including the beginning of
the header. A copy in another folder has the same fingerprint. Other weights under the same path have a different one,
because training changes all tensors. Other small files (config) are covered as a whole.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from moe_engine.gguf_container import parts_of

BLOCKS = 16
BLOCK_BYTES = 4096
SMALL_BYTES = 4 << 20
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
OTHERS = ("config.json", "params.json", "adapter_config.json", "quantize_config.json", "hf_quant_config.json")


def fingerprint_of(folder: str) -> str:
    """32 hex digits, of a checkpoint's folder, or of a GGUF file with its other parts.

    Raises:
        OSError: the folder cannot be read.
    """
    digest, files = hashlib.blake2b(digest_size=16), Path(folder)
    for path in parts_of(files) if files.is_file() else sorted(files / name for name in os.listdir(folder)):
        name = path.name
        if name in OTHERS and path.stat().st_size <= SMALL_BYTES:
            digest.update(f"{name}\0".encode() + path.read_bytes())
        elif name.endswith(WEIGHTS):
            size = path.stat().st_size
            digest.update(f"{name}\0{size}\0".encode())
            with path.open("rb") as file:
                for i in range(BLOCKS):
                    file.seek(i * max(0, size - BLOCK_BYTES) // max(1, BLOCKS - 1))
                    digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
