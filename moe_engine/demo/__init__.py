"""A small trained DeepSeek-V3 checkpoint that ships with the repository (importing this needs no torch)."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT_DIR: Path = Path(__file__).resolve().parent / "checkpoint"
"""Folder of the embedded checkpoint: config.json, tokenizer.json, FP8 safetensors shards and their index."""

__all__ = ["CHECKPOINT_DIR"]
